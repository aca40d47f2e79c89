"""The catalogue has every method, and its rules say what the library says."""

from __future__ import annotations

import inspect

import pytest
import torch

import paceline as pl
from paceline.roles import Asker, Observer
from tests.compose.catalogue import CATALOGUE, DEFAULTS, ROLES, method
from tests.compose.choices import pairs, sampled
from tests.compose.jobs import make
from tests.compose.rules import NEEDS, RULES, broken, choice
from tests.problems import data, mlp

# Public classes that are no method of a role, nor a setting of one that changes how roles go together.
NOT_OF_A_RUN = {
    "order": {"BalancedSampler", "Greedy", "MeanBalancer", "OneStream", "PairBalancer"},  # Greedy is the default
    "lr": {"Pace", "Scales", "Scaling"},
    "sync": {"Keep", "Steps"},  # the defaults
}
REFUSED = [each for each in [*pairs(), *sampled(200, refused=True)] if broken(each)]


@pytest.mark.parametrize("role", [role for role in ROLES if role != "probe"])
def test_the_catalogue_is_complete(role: str) -> None:
    module = getattr(pl, role)
    public = {name for name in module.__all__ if inspect.isclass(getattr(module, name))}
    words = {word for each in CATALOGUE if each.role == role for word in each.name.replace(".", " ").split()}
    assert public - NOT_OF_A_RUN.get(role, set()) <= words
    assert not NOT_OF_A_RUN.get(role, set()) & words


def test_names_are_those_of_classes_and_of_one_method_each() -> None:
    assert len({(each.role, each.name) for each in CATALOGUE}) == len(CATALOGUE)
    for each in CATALOGUE:
        assert type(each.make()).__name__ == each.title


def test_defaults_are_those_of_a_run() -> None:
    run = make(DEFAULTS)
    assert {name: type(role).__name__ for name, role in run.roles().items()} == DEFAULTS
    run.close()


def test_a_sync_that_takes_no_codec_has_no_argument_for_one() -> None:
    for each in CATALOGUE:
        if each.role == "sync" and "takes no codec" in each.kinds:
            assert "codec" not in inspect.signature(each.make).parameters
        elif each.role == "sync":
            each.make(codec=pl.codec.Identity())


def test_kinds_that_rules_speak_of_are_there() -> None:
    known = {kind for each in CATALOGUE for kind in each.kinds}
    spoken = {kind for rule in RULES for kind in (rule.one, rule.other)}
    spoken |= {kind for one, any_of, _ in NEEDS for kind in (one, *any_of)}
    assert spoken <= known
    assert known - spoken == {"takes no codec"}


def test_who_learns_is_said_to() -> None:
    """A new method that learns, and of which the catalogue says nothing, would be missed by all rules."""
    silent = {"decides for all", "shares"}
    for each in CATALOGUE:
        made = each.make()
        learns = isinstance(made, Observer) or (isinstance(made, Asker) and bool(made.needs))
        if each.role not in ("sync", "codec", "probe"):
            assert learns == bool(each.kinds - silent), each.name


def test_what_is_proposed_instead_goes_together() -> None:
    """In the place of the one of the same role; not all proposals need suit every method of the kind."""
    for chosen in pairs():
        for named, instead in broken(chosen):
            stays = {name: [each for each in named if each.role != name[0]] for name in instead}
            assert any(not broken(choice(*stays[name], method(*name))) for name in instead), chosen


def test_what_cannot_be_together_is_refused_when_the_run_is_made() -> None:
    """By an error that names what does not go together, and what would, for one of the rules that are broken."""
    assert len(REFUSED) > 300
    for chosen in REFUSED:
        with pytest.raises(pl.SettingError) as caught:
            make(chosen)
        said = str(caught.value)
        fitting = [
            rule
            for rule in broken(chosen)
            if all(each.title in said for each in rule[0]) and all(name.split()[-1] in said for _, name in rule[1])
        ]
        assert fitting, f"{chosen}: {said}"


def test_an_idle_probe_is_told_to_be_left_out_and_no_more_where_nothing_is_measured() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for sync, always in ((pl.sync.AllReduce(), True), (pl.sync.Gossip(2), False)):
        with pytest.raises(pl.SettingError, match=r"no role asks for measurements; leave it out") as caught:
            pl.Run(model, optimizer, data(40), batch=8, sync=sync, probe=pl.Probe(size=64))
        assert ("Probe(always=True" in str(caught.value)) is always


def test_a_role_of_ones_own_may_have_an_attribute_of_any_name() -> None:
    class Own(pl.batch.Fixed):
        refuse = True

    model, own = mlp(), Own(8)
    with pl.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), data(40), batch=own) as run:
        assert run.batch is own
