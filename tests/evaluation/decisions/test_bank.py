"""Which items are fresh, and which are one voice."""

from __future__ import annotations

from evaluation.decisions import bank
from evaluation.decisions.observations import per_voice
from evaluation.suites.held_out import prompt_key
from evaluation.suites.suite import Item
from tests.evaluation.decisions.worlds import seen


def item(name: str, prompt: str | None = None, **more: object) -> Item:
    return Item(id=name, prompt=prompt or f"prompt {name}", **more)  # type: ignore[arg-type]


def ids(voices: list[bank.Voice]) -> list[list[str]]:
    return [[one.id for one in voice] for voice in voices]


def test_every_item_is_fresh_once_in_an_order_that_does_not_depend_on_the_file() -> None:
    items = [item(str(i)) for i in range(50)]
    order = ids(bank.fresh(items, set()))
    assert sorted(order) == sorted([one.id] for one in items)
    assert order != [[one.id] for one in items]
    assert ids(bank.fresh(items[::-1], set())) == order
    assert ids(bank.fresh(items[:25], set())) == [voice for voice in order if int(voice[0]) < 25]


def test_items_of_one_prompt_and_of_one_cluster_are_one_voice_over_any_number_of_steps() -> None:
    items = [
        item("a", "Same  thing"), item("b", "same thing", answer="x"), item("c", cluster="k"),
        item("d", "same thing", cluster="k"), item("e"),
    ]  # fmt: skip
    assert sorted(ids(bank.fresh(items, set()))) == [["a", "b", "c", "d"], ["e"]]


def test_a_chat_of_one_message_is_the_same_prompt_as_its_text_whatever_the_system_s() -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Hello"}]
    assert prompt_key(Item(id="a", messages=chat)) == prompt_key(item("b", "hello"))


def test_what_has_decided_is_not_fresh_in_any_suite_nor_is_anything_that_depends_on_it() -> None:
    items = [item("a", "p", cluster="k"), item("b", cluster="k"), item("c")]
    assert ids(bank.fresh(items, {prompt_key(items[0])})) == [["c"]]
    redrawn = [item("x", "P"), item("y")]
    assert ids(bank.fresh(redrawn, {prompt_key(items[0])})) == [["y"]]


def test_a_cluster_of_another_suite_is_another_one() -> None:
    """Names are of a suite: in one that took its place, with other prompts, the same name says nothing."""
    before, other = item("a", cluster="1"), item("z", "something else", cluster="1")
    assert ids(bank.fresh([other], {prompt_key(before)})) == [["z"]]


def test_what_has_decided_is_the_regression_suite_in_each_candidate_s_own_order() -> None:
    items = [item(str(i)) for i in range(30)]
    used = {prompt_key(one) for one in items[:20]}
    first, second = (ids(bank.decided(items, used, name)) for name in ("sha-1", "sha-2"))
    assert sorted(first) == sorted(second) == sorted([one.id] for one in items[:20])
    assert first != second


def test_voices_are_taken_whole() -> None:
    voices = [(item("a"), item("b")), (item("c"),), (item("d"),)]
    assert ids(bank.take(voices, 1)) == [["a", "b"]]
    assert ids(bank.take(voices, 3)) == [["a", "b"], ["c"]]
    assert ids(bank.take(voices, 0)) == []


def test_a_voice_is_one_observation_the_mean_of_its_items_that_have_a_value() -> None:
    observed = [
        seen("a", 1.0, 0.0, prompt="p"), seen("b", 0.0, 0.0, prompt="p"), seen("c", 1.0, 1.0),
        seen("d", None, 0.0, prompt="p"),
    ]  # fmt: skip
    gain = {"a": 1.0, "b": 0.0, "c": 0.5, "d": None}
    values, names = per_voice(observed, lambda one: gain[one.item])
    assert (values.tolist(), names) == ([0.5, 0.5], ["a", "c"])
    assert per_voice(observed, lambda one: None)[1] == []


def test_a_voice_of_which_a_prompt_was_learned_from_is_refused_with_the_ids_of_all_its_items() -> None:
    items = [item("a", cluster="k"), item("b", cluster="k"), item("c"), item("d", "Prompt  D")]
    fit, refused = bank.unlearned(bank.fresh(items, set()), {prompt_key(item("x", "prompt a")), prompt_key(item("d"))})
    assert ids(fit) == [["c"]]
    assert sorted(refused) == ["a", "b", "d"]
