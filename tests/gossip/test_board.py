"""The trainer and the thread beside it: nothing is lost between them, and nothing counts twice."""

from __future__ import annotations

import threading

import torch

from paceline.gossip.board import Board


def show(board: Board, model: torch.Tensor) -> None:
    copy = board.blank()
    copy.copy_(model)
    board.show(copy)


def test_corrections_are_seen_before_they_are_taken() -> None:
    board = Board(2)
    assert board.lend() is None
    assert board.take() is None
    show(board, torch.tensor([1.0, 2.0]))
    board.correct(torch.tensor([0.5, 0.0]))
    board.correct(torch.tensor([0.25, 1.0]))
    shown = board.lend()
    assert shown is not None
    assert shown.tolist() == [1.75, 3.0]
    taken = board.take()
    assert taken is not None
    assert taken.tolist() == [0.75, 1.0]
    assert board.take() is None


def test_a_correction_between_taking_and_showing() -> None:
    board, model = Board(1), torch.tensor([10.0])
    show(board, model)
    assert board.take() is None
    board.correct(torch.tensor([1.0]))  # comes too late to be taken
    show(board, model)
    shown = board.lend()
    assert shown is not None
    assert shown.item() == 11.0
    taken = board.take()
    assert taken is not None
    assert taken.item() == 1.0


def test_what_is_lent_is_not_written_to() -> None:
    board = Board(1)
    show(board, torch.tensor([1.0]))
    lent = board.lend()
    assert lent is not None
    for value in range(2, 9):
        show(board, torch.tensor([float(value)]))
        board.correct(torch.tensor([0.0]))
    assert lent.item() == 1.0
    board.give_back()
    now = board.lend()
    assert now is not None
    assert now.item() == 8.0


def test_what_is_lent_is_not_corrected() -> None:
    board = Board(1)
    show(board, torch.tensor([1.0]))
    lent, blank = board.lend(), board.blank()
    assert lent is not None
    board.correct(torch.tensor([5.0]))  # while the trainer fills another copy
    assert lent.item() == 1.0
    board.give_back()
    now = board.lend()
    assert now is not None
    assert now.item() == 6.0
    assert now is not blank
    newest = board.copy()
    assert newest is not None
    assert newest.item() == 6.0


def test_two_threads() -> None:
    """Whatever comes between: in the end all corrections are in the model, and in what is shown."""
    board, model = Board(4), torch.zeros(4)
    show(board, model)
    number = 3000

    def exchange() -> None:
        for _ in range(number):
            board.lend()
            board.correct(torch.ones(4))
            board.give_back()

    thread = threading.Thread(target=exchange)
    thread.start()
    while thread.is_alive():
        if (change := board.take()) is not None:
            model += change
        show(board, model)
    thread.join()
    if (change := board.take()) is not None:
        model += change
    show(board, model)
    assert model.tolist() == [number] * 4
    shown = board.lend()
    assert shown is not None
    assert shown.tolist() == [number] * 4
