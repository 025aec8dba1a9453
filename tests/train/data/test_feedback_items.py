"""Feedback in a lake becomes sequences to learn from: what is left out is counted, and what people wrote is ended."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from deploy.examples.demo.seed import make_tokenizer
from feedback.config import LakeConfig
from feedback.lake.tables import Lake
from tests.feedback.feedback_rows import interaction, put, said
from train.batch.packed import Rollout
from train.config.training import TrainConfig
from train.data.demonstrations import DemonstrationTokenizer, UnfitTextError
from train.data.feedback_items import OVER_MOST, OfflineData, judgements, pack, split

EOS = 1  # of the demo's tokenizer
CONTEXT = 12
UNFIT = ("longer than the model's context", "tokens that the model does not have", "no tokens")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Config and tokenizer of a model of 12 tokens of context; reading needs no weights."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=CONTEXT).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Six prompts; of the first, two responses that are compared, one of them corrected; thumbs on the others."""
    lake = Lake(str(tmp_path_factory.mktemp("home") / "lake"), LakeConfig())
    lake.create()
    tokenizer = make_tokenizer()

    def answered(name: str, prompt: str, response: list[int], **columns: Any) -> dict[str, Any]:
        ids = tokenizer(prompt).input_ids
        sampled = {"response_token_ids": response, "logprobs": [-0.5] * len(response), "response": name}
        return interaction(name, prompt=prompt, prompt_token_ids=ids, **sampled, **columns)

    put(
        lake,
        "interactions",
        [
            answered("good", "odds ab>", [2, EOS]),
            answered("bad", "odds ab>", [3, 4], finish_reason="length"),
            answered("up", "ends cd>", [5, EOS]),
            answered("down", "ends ef>", [6, EOS]),
            answered("long", "ends gh>", [7] * 8),
            answered("other-model", "ends ij>", [999]),
            answered("silent", "ends kl>", []),
            answered("half", "ends mn>", [2], status="aborted"),
            answered("chat", "ends op>", [8, EOS], messages='[{"role": "user", "content": "ends op>"}]'),
        ],
    )
    put(
        lake,
        "feedback",
        [
            said("p", "good", "preference", rejected_response_id="bad"),
            said("c1", "bad", "correction", text="a", minute=1),
            said("c2", "chat", "correction", text="op", minute=2),
            said("c3", "up", "correction", text="c!", minute=3),
            said("t1", "up", "thumb", value=1.0, minute=4),
            said("t2", "down", "thumb", value=0.0, minute=5),
            *(said(f"t-{name}", name, "thumb", value=1.0) for name in ("long", "other-model", "silent", "half")),
            said("t9", "nobody", "thumb", value=1.0),
        ],
    )
    return lake


def read(lake: Lake, policy: Path, dataset: str, **data: Any) -> OfflineData:
    algorithm = {"pairs": "dpo", "thumbs": "kto", "demonstrations": "sft", "judgements": "reward_model"}[dataset]
    settings = {"name": algorithm} | ({"thumbs_up": data.pop("thumbs_up")} if "thumbs_up" in data else {})
    config = TrainConfig.model_validate({"data": {"held_out_share": 0, **data}, "algorithm": settings})
    return OfflineData.of(lake, lake.versions(), config, policy, 7, dataset)


def sequences(data: OfflineData) -> list[list[tuple[list[int], float]]]:
    return [[(rollout.response, rollout.reward) for rollout in item] for item in data.learned.items]


def test_pairs_are_the_chosen_response_and_the_rejected_one_with_the_tokens_as_sampled(
    lake: Lake, policy: Path
) -> None:
    data = read(lake, policy, "pairs")
    letters = {letter: make_tokenizer()(letter).input_ids for letter in "aop"}
    assert sequences(data) == [
        [([2, EOS], 1.0), ([3, 4], 0.0)],  # the rejected one ran into its longest length: no EOS is put there
        [([*letters["a"], EOS], 1.0), ([3, 4], 0.0)],
        [([*letters["o"], *letters["p"], EOS], 1.0), ([8, EOS], 0.0)],
    ]
    assert data.kinds == {"pairs by preference": 1, "pairs by correction": 2}
    assert data.left_out == {
        "text with special or unknown tokens": 1,  # the tokenizer has no "!"
        "on a response that is not complete": 1,
        "on an unknown response": 1,
    }


def test_thumbs_are_responses_with_their_verdicts_and_what_is_unusable_is_counted_by_reason(
    lake: Lake, policy: Path
) -> None:
    data = read(lake, policy, "thumbs")
    assert sequences(data) == [[([5, EOS], 1.0)], [([6, EOS], 0.0)]]
    assert data.kinds == {"thumbs up": 1, "thumbs down": 1}
    assert data.left_out == {
        "on a response that is not complete": 1,
        "on an unknown response": 1,
        "longer than the model's context": 1,
        "tokens that the model does not have": 1,
        "no tokens": 1,
    }
    assert "2 items to learn from and 0 held out (1 thumbs down, 1 thumbs up)" in str(data)
    assert "1 longer than the model's context" in str(data)


def test_a_thumb_on_a_response_is_learned_from_if_no_pair_of_it_can_be_read(lake: Lake, policy: Path) -> None:
    """The correction of ``up`` can't be tokenised; the pairs of the others can."""
    data = read(lake, policy, "judgements")
    assert data.kinds == {"pairs by preference": 1, "pairs by correction": 2, "votes": 2}
    votes = [item for item in sequences(data) if len(item) == 1]
    assert votes == [[([6, EOS], 0.0)], [([5, EOS], 1.0)]]
    assert data.left_out["text with special or unknown tokens"] == 1


def test_judgements_are_pairs_and_votes_by_time_the_newest_of_users_first_and_votes_on_pairs_last(
    lake: Lake, tmp_path: Path
) -> None:
    shutil.copytree(lake.uri, tmp_path / "lake")
    both = Lake(str(tmp_path / "lake"), LakeConfig())
    none = {"response_token_ids": [], "logprobs": [], "policy_spans": [], "finish_reason": None, "status": "imported"}
    put(both, "interactions", [interaction(f"import-{x}", prompt_token_ids=[3], response=x, **none) for x in "xyz"])
    put(
        both,
        "feedback",
        [
            said("i1", "import-x", "preference", rejected_response_id="import-y", minute=3),
            said("i2", "import-z", "thumb", value=1.0, minute=30),
            said("t20", "good", "thumb", value=1.0, minute=20),
        ],
    )

    def rows(**data: Any) -> tuple[list[tuple[str, dict[str, Any], list[Any]]], Counter[str]]:
        config = TrainConfig.model_validate({"data": data, "algorithm": {"name": "reward_model"}})
        left_out: Counter[str] = Counter()
        return list(judgements(both, both.versions(), config, left_out)), left_out

    every, _ = rows()
    of_pairs = [name for name, row, _ in every if not row.get("in_a_pair")]
    assert [name for name, *_ in every[len(of_pairs) :]] == ["votes"] * (len(every) - len(of_pairs))
    assert {row["response_id"] for _, row, _ in every[len(of_pairs) :]} == {"good", "up"}
    counted = every[: len(of_pairs)]
    times = [row["created_at"] for _, row, _ in counted]
    assert times == sorted(times)
    assert {name for name, *_ in counted} == {"pairs by preference", "pairs by correction", "votes"}
    assert all(row["weight"] > 0 for _, row, _ in every)
    for most in range(1, len(counted) + 1):
        ranked = sorted(range(len(counted)), key=lambda i: (counted[i][1]["imported"], -i))
        found, left_out = rows(max_prompts=most)
        kept = [counted[i] for i in sorted(ranked[:most])]
        assert found == kept + every[len(counted) :]
        assert left_out[OVER_MOST] == len(counted) - most


def test_a_liked_response_is_a_demonstration_only_where_the_config_says_so_and_nobody_corrected_it(
    lake: Lake, policy: Path, tmp_path: Path
) -> None:
    letters = make_tokenizer()
    corrections = [[([*letters("a").input_ids, EOS], 1.0)], [([*letters("op").input_ids, EOS], 1.0)]]
    assert sequences(read(lake, policy, "demonstrations")) == corrections
    assert sequences(read(lake, policy, "demonstrations", thumbs_up=True)) == corrections  # "up" was corrected
    shutil.copytree(lake.uri, tmp_path / "lake")
    later = Lake(str(tmp_path / "lake"), LakeConfig())
    put(later, "feedback", [said("t3", "good", "thumb", value=1.0, minute=9)])
    assert sequences(read(later, policy, "demonstrations", thumbs_up=True)) == [*corrections, [([2, EOS], 1.0)]]


def test_only_the_newest_items_are_learned_from_and_older_ones_counted(lake: Lake, policy: Path) -> None:
    data = read(lake, policy, "pairs", max_prompts=2)
    assert [item[1].response for item in data.learned.items] == [[8, EOS]]  # the other one of the two is the unfit text
    assert data.left_out["over train.data.max_prompts (users' newest come first, then imported ones)"] == 2


@pytest.mark.parametrize(
    ("dataset", "thumbs_up", "own"), [("pairs", False, 3), ("thumbs", False, 2), ("demonstrations", True, 2)]
)
def test_imported_feedback_takes_no_place_of_what_users_said_however_new_it_is(
    lake: Lake, policy: Path, tmp_path: Path, dataset: str, thumbs_up: bool, own: int
) -> None:
    shutil.copytree(lake.uri, tmp_path / "lake")
    both = Lake(str(tmp_path / "lake"), LakeConfig())
    tokenizer = make_tokenizer()
    none = {"response_token_ids": [], "logprobs": [], "policy_spans": [], "finish_reason": None, "status": "imported"}
    prompt = {"prompt": "odds cd>", "prompt_token_ids": tokenizer("odds cd>").input_ids}
    letters = "abcdefgh"
    put(both, "interactions", [interaction(f"import-{x}", response=x, **prompt, **none) for x in [*letters, "z"]])
    for minute, x in enumerate(letters, 20):
        rows = {
            "pairs": said(f"i-{x}", f"import-{x}", "preference", rejected_response_id="import-z", minute=minute),
            "thumbs": said(f"i-{x}", f"import-{x}", "thumb", value=1.0, minute=minute),
            "demonstrations": said(f"i-{x}", f"import-{x}", "correction", text=x, minute=minute),
        }
        put(both, "feedback", [rows[dataset]])
    before = read(lake, policy, dataset, thumbs_up=thumbs_up)
    rows_of_users = sum(before.kinds.values()) + before.left_out.get("text with special or unknown tokens", 0)
    rows_of_users += sum(before.left_out.get(why, 0) for why in UNFIT)
    data = read(both, policy, dataset, thumbs_up=thumbs_up, max_prompts=rows_of_users + 2)
    newest = [[*tokenizer(letter).input_ids, EOS] for letter in "gh"]
    assert [item[0].response for item in data.learned.items[-2:]] == newest
    assert sequences(data)[:-2] == sequences(before)
    assert len(sequences(before)) == own
    assert data.left_out[OVER_MOST] == 6


def test_reading_the_same_versions_again_gives_the_same_digest_and_other_feedback_another(
    lake: Lake, policy: Path
) -> None:
    assert read(lake, policy, "pairs").digest == read(lake, policy, "pairs").digest
    assert read(lake, policy, "pairs").digest != read(lake, policy, "pairs", max_prompts=2).digest


def test_a_batch_of_pairs_has_a_group_a_pair_and_keeps_it_whole(lake: Lake, policy: Path) -> None:
    batch = pack(read(lake, policy, "pairs").learned.items, whole_groups=True)
    assert batch.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.rewards.tolist() == [1.0, 0.0] * 3
    assert sorted(part.tolist() for part in batch.micro_batches(1)) == [[0, 1], [2, 3], [4, 5]]
    assert not batch.fresh.any()


def test_a_lake_without_feedback_gives_nothing_to_learn_from(policy: Path, tmp_path: Path) -> None:
    empty = Lake(str(tmp_path / "lake"), LakeConfig())
    empty.create()
    data = read(empty, policy, "pairs", held_out_share=0.5)
    assert data.usable == 0
    assert str(data) == "0 items to learn from and 0 held out (); left out: none"


# --------------------------------------------------------------------------------------------------- held-out items


def item(prompt: int) -> list[Rollout]:
    return [Rollout([prompt], [2], [0.0], 1.0, 0)]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=60),
    st.floats(0, 0.9),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_no_prompt_is_both_learned_from_and_held_out(prompts: list[int], share: float, least: int, most: int) -> None:
    items = [item(p) for p in prompts]
    learned, held = split(items, [(p,) for p in prompts], share, least=least, most=most)
    asked, kept = {i[0].prompt[0] for i in learned}, {i[0].prompt[0] for i in held}
    assert not asked & kept
    assert sorted(i[0].prompt[0] for i in learned + held) == sorted(prompts)
    assert 2 * len(kept) <= len(asked | kept)
    assert not held or (len(kept) >= least and share > 0)
    assert len(kept) <= max(round(share * len(asked | kept)), least)


def test_most_prompts_that_were_held_out_stay_so_as_more_come_in() -> None:
    def held(count: int) -> set[int]:
        prompts = [(p,) for p in range(count)]
        return {i[0].prompt[0] for i in split([item(p) for p in range(count)], prompts, 0.2, least=1, most=99)[1]}

    before, after = held(100), held(110)
    assert len(before) == 20
    assert len(before - after) <= 3


# ------------------------------------------------------------------------------------------- what people wrote


def tokenizer_of(normalizer: Any = None, **settings: Any) -> PreTrainedTokenizerFast:
    """One token a character."""
    words = ["<pad>", "<eos>", "<end>", "▁", *"abc:"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    special = {"pad_token": "<pad>", "unk_token": "<pad>", "extra_special_tokens": ["<end>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **settings)


TEMPLATE = """{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%} : {%- endif -%} {{ message['content'] }} {{- '<end>' -}} {%- endfor -%}
{%- if add_generation_prompt -%} : {%- endif -%}"""
ASKED: dict[str, Any] = {"prompt": "c<end>:", "prompt_token_ids": [6, 2, 7]}
MESSAGES = '[{"role": "user", "content": "c"}]'


def chat_policy(folder: Path, template: str) -> DemonstrationTokenizer:
    tokenizer_of(eos_token="<eos>", chat_template=template).save_pretrained(folder)
    GenerationConfig(eos_token_id=[1, 2]).save_pretrained(folder)
    return DemonstrationTokenizer(folder)


def test_the_answer_to_messages_ends_with_the_token_that_the_template_ends_a_turn_with(tmp_path: Path) -> None:
    writer = chat_policy(tmp_path, TEMPLATE)
    assert (
        writer.tokenizer.apply_chat_template(json.loads(MESSAGES), tokenize=False, add_generation_prompt=True)
        == (ASKED["prompt"])
    )
    assert writer.token_ids("ab", **ASKED, messages=MESSAGES) == [4, 5, 2]
    assert writer.token_ids("ab", **ASKED, messages=None) == [4, 5, 1]


def test_without_a_generation_config_a_response_ends_by_the_tokens_that_config_json_names_as_in_vllm(
    tmp_path: Path,
) -> None:
    tokenizer_of(eos_token="<eos>", chat_template=TEMPLATE).save_pretrained(tmp_path)
    Qwen3Config(eos_token_id=[1, 2]).save_pretrained(tmp_path)
    assert DemonstrationTokenizer(tmp_path).token_ids("ab", **ASKED, messages=MESSAGES) == [4, 5, 2]


def test_what_the_template_puts_before_an_answer_and_the_policy_therefore_samples_is_part_of_it(
    tmp_path: Path,
) -> None:
    with_a_thought = TEMPLATE.replace("{{ message['content'] }}", "{{ 'bb' if loop.last }}{{ message['content'] }}")
    writer = chat_policy(tmp_path, with_a_thought.replace("loop.last", "message['role'] == 'assistant'"))
    assert writer.token_ids("a", **ASKED, messages=MESSAGES) == [5, 5, 4, 2]


def test_a_prompt_that_was_made_of_more_than_the_messages_leaves_the_text_as_it_is_and_the_turn_ended(
    tmp_path: Path,
) -> None:
    other: dict[str, Any] = {"prompt": "cc:", "prompt_token_ids": [6, 6, 7]}
    assert chat_policy(tmp_path / "a", TEMPLATE).token_ids("ab", **other, messages=MESSAGES) == [4, 5, 2]
    last_alone = "{{ messages[-1]['content'] }}"
    assert chat_policy(tmp_path / "b", last_alone).token_ids("ab", **other, messages=MESSAGES) == [4, 5, 1]


def test_a_text_that_the_template_fails_on_is_left_out(tmp_path: Path) -> None:
    writer = chat_policy(tmp_path, "{{ raise_exception('no') }}")
    with pytest.raises(UnfitTextError, match="chat template"):
        writer.token_ids("ab", **ASKED, messages=MESSAGES)


def test_a_tokenizer_that_begins_texts_with_a_space_puts_none_inside_a_text(tmp_path: Path) -> None:
    tokenizer_of(normalizers.Prepend("▁"), eos_token="<eos>").save_pretrained(tmp_path)
    writer = DemonstrationTokenizer(tmp_path)
    assert writer.token_ids("b", prompt="a", prompt_token_ids=[3, 4], messages=None) == [5, 1]
    assert writer.token_ids("b", prompt=None, prompt_token_ids=[3, 4], messages=None) == [3, 5, 1]  # no text


def test_a_text_that_speaks_for_the_next_turn_is_refused(tmp_path: Path) -> None:
    tokenizer_of(eos_token="<eos>").save_pretrained(tmp_path)
    with pytest.raises(UnfitTextError, match="special"):
        DemonstrationTokenizer(tmp_path).token_ids("a<end>b", prompt="c", prompt_token_ids=[6], messages=None)


def test_a_policy_without_eos_can_not_learn_from_texts_and_the_error_says_what_would_do(tmp_path: Path) -> None:
    tokenizer_of().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has no EOS token.*set eos_token"):
        DemonstrationTokenizer(tmp_path).token_ids("a", prompt="c", prompt_token_ids=[6], messages=None)


def test_what_was_imported_is_tokenised_and_ended_as_what_people_wrote_and_counted_as_imported(
    tmp_path: Path, policy: Path
) -> None:
    lake = Lake(str(tmp_path / "lake"), LakeConfig())
    lake.create()
    tokenizer = make_tokenizer()
    none = {"response_token_ids": [], "logprobs": [], "policy_spans": [], "finish_reason": None, "status": "imported"}
    prompt = {"prompt": "odds ab>", "prompt_token_ids": tokenizer("odds ab>").input_ids}
    put(
        lake,
        "interactions",
        [
            interaction("import-1", response="a", **prompt, **none),
            interaction("import-2", response="b", **prompt, **none),
        ],
    )
    put(
        lake,
        "feedback",
        [
            said("p", "import-1", "preference", rejected_response_id="import-2"),
            said("t", "import-2", "thumb", value=0.0),
            said("c", "import-1", "correction", text="a"),
        ],
    )
    a, b = ([*tokenizer(letter).input_ids, EOS] for letter in "ab")
    pairs, thumbs, written = (read(lake, policy, dataset) for dataset in ("pairs", "thumbs", "demonstrations"))
    assert sequences(pairs) == [[(a, 1.0), (b, 0.0)]]
    assert sequences(thumbs) == [[(b, 0.0)]]
    assert sequences(written) == [[(a, 1.0)]]
    assert (pairs.kinds, thumbs.kinds) == ({"imported pairs by preference": 1}, {"imported thumbs down": 1})
