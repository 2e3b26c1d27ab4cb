"""Plans as plain data: invalid ones are refused, they print, and JSON loses nothing."""

from __future__ import annotations

import pytest

from torch_recompute import ArgumentError, Choice, OnHost, Plan

PLAN = Plan(
    (
        Choice(("layers.0",), keep=("self_attn", "@attention"), labels=("layernorm",)),
        Choice(("layers.1", "layers.2"), carry=True),
        Choice(("",), store="host"),
    ),
    source="a test",
)


def test_json_loses_nothing() -> None:
    """A plan read from its own JSON is the same plan."""
    assert Plan.from_json(PLAN.to_json()) == PLAN
    assert Plan.from_json(Plan().to_json()) == Plan()


def test_a_plan_written_before_there_were_stores_is_read() -> None:
    """JSON without the field says that inputs stay where they are."""
    old = '{"version": 1, "source": "", "choices": [{"paths": ["a"], "keep": [], "carry": false, "labels": []}]}'
    assert Plan.from_json(old) == Plan((Choice(("a",)),))


def test_prints_one_line_per_region() -> None:
    """Each region is a sentence: where, what is kept, what is carried, who asked."""
    assert str(PLAN).split("\n") == [
        "plan of 3 regions, from a test",
        "  recompute layers.0, self_attn and attention kept  (layernorm)",
        "  recompute layers.1 to layers.2, decisions carried",
        "  recompute the model, inputs in host memory",
    ]


def test_its_words_are_explained() -> None:
    """Each kind of call, and what is said of regions, has a line."""
    said = PLAN.explain()
    assert [word for word in ("attention", "kept", "decisions carried", "inputs", "(") if word not in said] == []
    assert "matmuls" not in said


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        (["@product"], "matmuls kept"),
        (["up@product", "gate@product", "attn"], "attn and matmuls in up and gate kept"),
        (["c_proj@values_unused"], "c_proj not rerun"),
        (["@attention", "c_proj@values_unused"], "attention kept, c_proj not rerun"),
    ],
)
def test_what_is_kept_is_said_in_words(keep: list[str], words: str) -> None:
    """A printed plan names what a region keeps in words, with the modules; labels stay in JSON."""
    plan = Plan((Choice(("layers.0",), keep=tuple(keep)),))
    assert str(plan).endswith(f"recompute layers.0, {words}")
    assert Plan.from_json(plan.to_json()) == plan
    assert all(word in plan.to_json() for word in keep)


def test_nested_members_are_several() -> None:
    """Members that are regions of their own in the replay of them all are said and kept in JSON; one cannot be so."""
    plan = Plan((Choice(("layers.0", "layers.1"), nested=True),))
    assert Plan.from_json(plan.to_json()) == plan
    assert str(plan.choices[0]) == "recompute layers.0 to layers.1, then each again"
    with pytest.raises(ArgumentError, match=r"is for several modules, and 'layers\.0' is one"):
        Plan((Choice(("layers.0",), nested=True),))


def test_diff_says_what_differs() -> None:
    """A difference names the regions that go and come; equal choices have none, whatever their source."""
    other = Plan((*PLAN.choices[:1], Choice(("layers.1",))), source="another")
    lines = PLAN.diff(other).split("\n")
    assert [line for line in lines if line[:1] in "+-" and line[:3] not in ("---", "+++")] == [
        "-recompute layers.1 to layers.2, decisions carried",
        "-recompute the model, inputs in host memory",
        "+recompute layers.1",
    ]
    assert PLAN.diff(Plan(PLAN.choices, source="the same")) == ""


def test_digest_is_of_the_choices() -> None:
    """A digest is the same wherever the plan is read, whatever its source; any difference in a choice changes it."""
    assert PLAN.digest() == Plan.from_json(PLAN.to_json()).digest() == Plan(PLAN.choices, source="another").digest()
    assert Plan().digest() == "1788f993b4772e3516f5409992386cee14668f98ca23773646f1670a8ffaf8d9"
    others = [
        Plan(PLAN.choices[1:]),
        Plan(PLAN.choices[::-1]),
        Plan((*PLAN.choices[:1], Choice(("layers.1", "layers.2")), *PLAN.choices[2:])),
        Plan((Choice(("layers.0",), keep=("self_attn",), labels=("layernorm",)), *PLAN.choices[1:])),
    ]
    assert len({plan.digest() for plan in (PLAN, *others)}) == 5


def test_is_a_value() -> None:
    """Plans compare and hash by what they say, and iterate over their choices."""
    assert {PLAN, Plan(PLAN.choices, "a test")} == {PLAN}
    assert list(PLAN) == list(PLAN.choices)
    assert len(PLAN) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "no JSON"),
        ("[]", "version 1"),
        ('{"version": 2, "source": "", "choices": []}', "version 1"),
        ('{"version": 1, "source": ""}', "missing or unknown: 'choices'"),
        ('{"version": 1, "source": "", "choices": [{"path": "a"}]}', "missing or unknown"),
    ],
)
def test_json_of_something_else_is_refused(text: str, why: str) -> None:
    """A text that is no plan is refused with the reason."""
    with pytest.raises(ArgumentError, match=why):
        Plan.from_json(text)


@pytest.mark.parametrize(
    "choices",
    [
        [Choice(())],
        [Choice(("a",)), Choice(("b", "a"))],
        [Choice(("a", "a"))],
        [Choice(("a", "b"), keep=("c",))],
        [Choice(("a",), keep=("@everything",))],
        [Choice(("a",), keep=("b@everything",))],
        [Choice(("a",), store=OnHost())],  # type: ignore[arg-type]
    ],
)
def test_contradictions_are_refused(choices: list[Choice]) -> None:
    """No path, a path twice, saved calls of several modules, an unknown kind, a store for its word: none is a plan."""
    with pytest.raises(ArgumentError, match="this is not a plan"):
        Plan(tuple(choices))
