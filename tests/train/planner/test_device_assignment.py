"""Which devices serve, train and evaluate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.planner.assignment import Assignment, CannotAssign, Need, Use, assign, devices_text

TP, RANKS, JUDGE = "serve.engine.tensor_parallel_size", "train.ranks", "evaluation.engine.tensor_parallel_size"


def dealt(
    devices: int | None,
    serve: int,
    train: int,
    evaluate: int,
    use: Use = "auto",
    chosen: dict[str, tuple[int, ...]] | None = None,
) -> Assignment:
    names = {"serve": (serve, TP), "train": (train, RANKS), "evaluate": (evaluate, JUDGE)}
    return assign(devices, *(Need(*need, (chosen or {}).get(role)) for role, need in names.items()), use=use)


@pytest.mark.parametrize(
    ("devices", "needs", "expected"),
    [
        (8, (1, 4, 1), ((0,), (1, 2, 3, 4), (5,))),  # some are left for evaluation
        (5, (1, 4, 1), ((0,), (1, 2, 3, 4), (1,))),  # none: it has training's, which waits for it
        (4, (2, 2, 1), ((0, 1), (2, 3), (2,))),
        (2, (1, 1, 1), ((0,), (1,), (1,))),
        (8, (4, 0, 2), ((0, 1, 2, 3), (), (4, 5))),  # training is on a cluster
        (1, (0, 1, 1), ((), (0,), (0,))),  # the server is
    ],
)
def test_each_has_its_own_where_there_are_enough(
    devices: int, needs: tuple[int, int, int], expected: tuple[tuple[int, ...], ...]
) -> None:
    for use in ("auto", "own"):
        found = dealt(devices, *needs, use)  # type: ignore[arg-type]
        assert (found.serve, found.train, found.evaluate) == expected
        assert not found.in_turns


@pytest.mark.parametrize(
    ("devices", "needs", "expected", "waits_for"),
    [
        (1, (1, 1, 1), ((0,), (0,), (0,)), ("train", "evaluate")),
        (4, (1, 4, 1), ((0,), (0, 1, 2, 3), (1,)), ("train",)),  # evaluation has one that the server has not
        (4, (2, 3, 2), ((0, 1), (1, 2, 3), (2, 3)), ("train",)),
        (8, (8, 8, 1), (tuple(range(8)), tuple(range(8)), (0,)), ("train", "evaluate")),
        (4, (2, 2, 4), ((0, 1), (2, 3), (0, 1, 2, 3)), ("evaluate",)),
    ],
)
def test_where_they_do_not_suffice_the_server_sleeps_for_whom_it_shares_with(
    devices: int, needs: tuple[int, int, int], expected: tuple[tuple[int, ...], ...], waits_for: tuple[str, ...]
) -> None:
    found = dealt(devices, *needs)
    assert (found.serve, found.train) == expected[:2]
    assert found.waits_for == waits_for
    assert len(found.evaluate) == needs[2]
    assert set(found.evaluate) == set(expected[2]) or waits_for == ("train", "evaluate")
    with pytest.raises(CannotAssign, match=r"devices\.use=own"):
        dealt(devices, *needs, "own")


@given(st.integers(1, 16), st.integers(0, 16), st.integers(0, 16), st.integers(1, 16), st.sampled_from(["auto", "own"]))
def test_everybody_has_as_many_as_it_needs_and_the_server_waits_for_exactly_those_that_it_shares_with(
    devices: int, serve: int, train: int, evaluate: int, use: Use
) -> None:
    try:
        found = dealt(devices, serve, train, evaluate, use)
    except CannotAssign:
        enough = max(serve, train, evaluate) <= devices
        assert not enough or (use == "own" and serve + max(train, evaluate) > devices and serve > 0)
        return
    for role, count in (("serve", serve), ("train", train), ("evaluate", evaluate)):
        numbers = found.of(role)  # type: ignore[arg-type]
        assert len(set(numbers)) == len(numbers) == count
        assert all(0 <= number < devices for number in numbers)
    shares = [role for role in ("train", "evaluate") if set(found.of(role)) & set(found.serve)]  # type: ignore[arg-type]
    assert list(found.waits_for) == shares
    assert not shares or serve + max(train, evaluate) > devices
    shared = len(set(found.train) & set(found.serve))
    assert shared == max(0, serve + train - devices), "no more than must be"


def test_in_turns_they_share_as_many_as_they_can() -> None:
    found = dealt(8, 1, 8, 1, "in_turns")
    assert (found.serve, found.train, found.waits_for) == ((0,), tuple(range(8)), ("train", "evaluate"))
    assert dealt(8, 2, 2, 1, "in_turns", {"train": (4, 5)}).serve == (4, 5), "on those that somebody has chosen"
    with pytest.raises(CannotAssign, match="shares none with training or evaluation"):
        dealt(8, 2, 2, 1, "in_turns", {"serve": (0, 1), "train": (4, 5), "evaluate": (6,)})


def test_what_is_chosen_stays_and_the_others_keep_clear_of_it() -> None:
    found = dealt(4, 1, 2, 1, chosen={"train": (0, 1)})
    assert (found.serve, found.train, found.evaluate, found.in_turns) == ((2,), (0, 1), (3,), False)
    more = dealt(4, 1, 1, 1, chosen={"serve": (3,), "train": (3, 2)})
    assert (more.serve, more.train, more.waits_for) == ((3,), (3, 2), ("train",))


def test_on_a_cpu_nothing_is_dealt_out_but_turns_can_be_taken() -> None:
    found = dealt(None, 1, 1, 1, "in_turns")
    assert (found.serve, found.train, found.evaluate) == ((), (), ())
    assert found.waits_for == ("train", "evaluate")
    assert dealt(None, 1, 0, 1, "in_turns").waits_for == ("evaluate",), "training is on a cluster"
    assert not dealt(None, 1, 1, 1, chosen={"serve": (5,), "train": (6,)}).in_turns


@pytest.mark.parametrize(
    ("devices", "needs", "use", "chosen", "why"),
    [
        (2, (1, 4, 1), "auto", {}, r"training needs 4 devices \(train\.ranks\), and there are 2: lower train\.ranks"),
        (1, (2, 1, 1), "auto", {}, r"the server needs 2 devices \(serve\.engine.*\), and there is 1"),
        (2, (1, 1, 1), "auto", {"serve": (2,)}, r"devices\.serve names device 2, and this machine has devices 0 to 1"),
        (4, (1, 3, 1), "auto", {"train": (2, 3)}, r"devices\.train has devices 2 and 3, and training needs 3"),
        (4, (2, 4, 1), "own", {}, r"4 devices are too few .* training 4 \(train\.ranks\).*; lower train\.ranks to 2"),
        (4, (1, 1, 1), "own", {"serve": (0,), "train": (0,), "evaluate": (1,)}, "the server shares device 0 with"),
    ],
)
def test_what_can_not_be_is_refused_and_the_text_says_what_could(
    devices: int, needs: tuple[int, int, int], use: Use, chosen: dict[str, tuple[int, ...]], why: str
) -> None:
    with pytest.raises(CannotAssign, match=why):
        dealt(devices, *needs, use, chosen)


def test_it_says_who_has_what() -> None:
    assert str(dealt(8, 1, 4, 1)) == "the server has device 0, training has devices 1 to 4, evaluation has device 5"
    assert str(dealt(1, 1, 1, 1)) == (
        "the server has device 0, training has device 0, evaluation has device 0; the server sleeps while training or "
        "evaluation works"
    )
    assert str(dealt(None, 1, 1, 1, "in_turns")) == "the server sleeps while training or evaluation works"
    assert [devices_text(numbers) for numbers in ((3,), (0, 1), (0, 1, 2), (0, 2, 5))] == [
        "device 3",
        "devices 0 and 1",
        "devices 0 to 2",
        "devices 0, 2 and 5",
    ]
