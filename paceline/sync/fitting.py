"""Which settings of Local SGD are right, and fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.codec import Identity
from paceline.codec.lattice import refuse_lattice
from paceline.errors import SettingError
from paceline.order.learnt import Learnt
from paceline.role_check import asking, check_object
from paceline.roles import Need
from paceline.sync.every import timed, whole
from paceline.sync.optimizer_state import Average
from paceline.sync.statistics import Measuring

if TYPE_CHECKING:
    from paceline.sync.local_sgd import LocalSGD

__all__ = ["check_codec", "refuse_roles", "refuse_what_does_not_fit"]


def refuse_what_does_not_fit(role: LocalSGD) -> None:
    """Settings that are wrong, or cannot be together."""
    name = type(role).__name__
    check_object("optimizer_state", role.optimizer_state, "averaged", "Keep(), Average() or Reset()")
    check_codec(role.codec)
    refuse_lattice(role.codec, name)
    if not isinstance(role.measuring, Measuring):
        raise SettingError(f"measuring ({role.measuring!r}) must be Measuring.FIRST or Measuring.LAST")
    if not whole(role.overlap, least=0):
        raise SettingError(f"overlap ({role.overlap!r}) must be a whole number of steps, or 0 for none")
    if role.overlap and timed(role.every):
        raise SettingError(
            f"{name} cannot overlap rounds that are measured by the clock: the examples of the next one are dealt "
            "when it is known what was used in the last; use rounds of steps or examples, or overlap=0"
        )
    if role.measuring is Measuring.LAST and timed(role.every):
        raise SettingError(
            f"{name} cannot know which step of a round that is measured by the clock is its last; use "
            "measuring=Measuring.FIRST"
        )
    if isinstance(role.optimizer_state, Average) and (role.overlap or not isinstance(role.codec, Identity)):
        raise SettingError(
            f"{name} averages optimizer state at once and in full precision only (second moments must not become "
            f"negative), not with codec={role.codec!r} and overlap={role.overlap}; use Keep() or Reset() with a codec "
            "or overlap"
        )


def check_codec(codec: object) -> None:
    """Refuse what is no codec; the name of one, too."""
    check_object("codec", codec, "decode", "codec.Half() or codec.Uniform8()")


def refuse_roles(role: LocalSGD, roles: dict[str, object], always: bool) -> None:
    """Refuse what cannot be measured where models are averaged, and no gradients."""
    title = type(role).__name__
    for name, other in asking(roles, (Need.DIRECTION, Need.COORDINATES)).items():
        raise SettingError(
            f"{title} exchanges no gradients, only sketches of them, from which {name}={other!r} cannot compare "
            "directions or coordinates; use batch.NormTest, or AllReduce"
        )
    for name, other in asking(roles, (Need.UNITS,) if role.overlap else ()).items():
        raise SettingError(
            f"{title}(overlap={role.overlap}): {name}={other!r} learns from gradients, and needs all workers to meet "
            "before the next epoch begins, but averages in the background come later; leave overlap out, or use "
            "order.Shuffle"
        )
    order = roles["order"]
    if isinstance(order, Learnt) and order.preconditioned and not isinstance(role.optimizer_state, Average):
        raise SettingError(
            f"{title}: order={order!r} balances the gradients of all workers as the optimizer divides them, but with "
            f"optimizer_state={role.optimizer_state!r} an epoch does not begin with the same divisors on all; use "
            "optimizer_state=sync.Average(), or sync.AllReduce"
        )
    if role.measuring is not Measuring.FIRST and not always and not asking(roles, (Need.VARIANCE,)):
        raise SettingError(
            f"{title}(measuring={role.measuring}) has no effect, since no role asks for the noise of gradients; leave "
            "it out, or use batch.NormTest or lr.AdaScale"
        )
