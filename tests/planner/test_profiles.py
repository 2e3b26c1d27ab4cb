"""Several profiles: their differences, and one that is safe for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_recompute import ArgumentError, Choice, Plan, Profile, solve
from torch_recompute.planner.cost import Costs, Graph, HostMemory, Kind, Node, Option, Point, Segment, peak

MIB = 2**20


def graph(seconds: float, count: int) -> Graph:
    return Graph((Node(seconds, count, (-1,), True), Node(seconds, count, (0,))), 1, count)


def made(mib: int = 4, seconds: float = 0.002, *, kept: bool = True, layers: int = 4) -> Profile:
    """A model of layers whose plain form keeps `mib`, and whose replay takes `seconds`."""
    options = [Option((), mib * MIB, mib * MIB, (mib + 2) * MIB, 0.0)]
    options += (
        [Option((Choice(("",), ("@product",)),), 2 * MIB, mib * MIB, (mib + 1) * MIB, seconds / 2, 50)] if kept else []
    )
    options += [Option((Choice(("",)),), MIB, (mib + 1) * MIB, (mib + 3) * MIB, seconds, 100)]
    costs = Costs(
        {"0": Kind(tuple(options), graph(seconds / 2, mib * MIB // 2))},
        tuple(Segment(f"layers.{i}", "0", 10 * MIB, (10 + i) * MIB) for i in range(layers)),
        (Point(layers, 12 * MIB, "loss"),),
        0.1 + seconds,
        11 * MIB,
    )
    return Profile("Net", "cpu", costs, (layers * mib + 16) * MIB, timing="single operations timed on cpu")


def test_equal_profiles_differ_in_nothing() -> None:
    """Of a profile and what is read from its JSON nothing is shown."""
    assert made().diff(Profile.from_json(made().to_json())) == ""


def test_a_difference_is_a_line_a_person_can_read() -> None:
    """The head says what differs of the step, the table what differs of one segment of each kind."""
    other = replace(made(6, 0.003, kept=False), device="h100", left_out=(("head", "is called twice"),))
    assert made().diff(other).split("\n") == [
        "device: cpu -> h100",
        "peak without recomputation, MiB: 32.00 -> 40.00",
        "step without recomputation, ms: 102.000 -> 103.000",
        "not planned: - -> head",
        "segments  how many  keeps MiB     least MiB  backward MiB  least costs ms  ways",
        "layers.*  4         4.00 -> 6.00  1.00       6.00 -> 8.00  2.000 -> 3.000  3 -> 2",
    ]


def test_segments_that_one_profile_lacks() -> None:
    """More layers of one kind are a number; another kind under the same pattern is a line of its own."""
    more = made(layers=6)
    assert "4 -> 6" in made().diff(more)
    mixed = replace(
        more,
        costs=replace(
            more.costs,
            kinds={**more.costs.kinds, "1": made(8).costs.kinds["0"]},
            segments=tuple(replace(s, kind="1") if s.path > "layers.3" else s for s in more.costs.segments),
        ),
    )
    lines = made().diff(mixed).split("\n")
    assert " ".join(lines[-1].split()) == "layers.* (2) - -> 2 - -> 8.00 - -> 1.00 - -> 10.00 - -> 2.000 - -> 3"
    assert not any(line.startswith("layers.* ") and "(2)" not in line for line in lines)


def test_merged_bytes_are_the_largest_and_seconds_the_median() -> None:
    """Each figure on its own, and the bound's bytes the fewest."""
    slow, large = made(4, 0.010), made(6, 0.001)
    one = made().merge(slow, large)
    plain, keeping, whole = one.costs.kinds["0"].options
    assert (plain.saved_bytes, plain.backward_bytes) == (6 * MIB, 8 * MIB)
    assert (keeping.saved_bytes, keeping.seconds, keeping.flops) == (2 * MIB, 0.001, 50)
    assert (whole.forward_bytes, whole.seconds) == (7 * MIB, 0.002)
    assert one.costs.step_seconds == pytest.approx(0.102)
    assert one.plain_peak_bytes == 40 * MIB
    assert one.costs.kinds["0"].graph == graph(0.001, 2 * MIB)
    assert one.timing == "medians of 3 profiles (single operations timed on cpu)"
    assert made().merge() == replace(made(), timing="medians of 1 profiles (single operations timed on cpu)")
    assert Profile.from_json(one.to_json()) == one


def test_what_fits_the_merged_profile_fits_each() -> None:
    """At every budget the merged plan's options, found in each profile, have a peak within it."""
    several = [made(4, 0.010), made(6, 0.001), made(5, 0.004)]
    one = several[0].merge(*several[1:])
    for share in (0.05, 0.3, 0.6, 0.9):
        plan = solve(one, budget=share)
        assert plan.prediction is not None
        for profile in several:
            assert _peak(profile, plan) <= plan.prediction.budget_bytes


def _peak(profile: Profile, plan: Plan) -> int:
    regions = {choice.paths[0]: (Choice(("",), choice.keep),) for choice in plan.choices}
    options = profile.costs.kinds["0"].options
    chosen = [next(o for o in options if o.regions == regions.get(s.path, ())) for s in profile.costs.segments]
    return peak(profile.costs, chosen).bytes


def test_ways_that_not_all_have_are_left_out() -> None:
    """An option that one profile has not tried is no option of the merged one; graphs that differ bound nothing."""
    one = made().merge(made(kept=False))
    assert [option.regions for option in one.costs.kinds["0"].options] == [(), (Choice(("",)),)]
    without = made()
    kind = without.costs.kinds["0"]
    without = replace(without, costs=replace(without.costs, kinds={"0": replace(kind, graph=None)}))
    assert made().merge(without).costs.kinds["0"].graph is None


def test_host_memory_and_groups_are_merged() -> None:
    """Options that differ in where inputs are kept or in nesting are several; host memory has the smaller limit."""

    def offloading(limit: int | None, count: int) -> Profile:
        one = made()
        (whole,) = [option for option in one.costs.kinds["0"].options if option.regions == (Choice(("",)),)]
        options = (
            replace(whole, regions=(Choice(("",), store="host"),), saved_bytes=0, host_bytes=count),
            replace(whole, regions=(Choice(("",), nested=True),), span=2),
            replace(whole, span=2),
        )
        kinds = {"0": replace(one.costs.kinds["0"], options=(*one.costs.kinds["0"].options, *options))}
        return replace(one, costs=replace(one.costs, kinds=kinds, host_memory=HostMemory(limit, 1e9)))

    one = offloading(None, 7).merge(offloading(100, 9))
    assert one.costs.host_memory == HostMemory(100, 1e9)
    assert [(o.store, o.host_bytes, o.span, o.nested) for o in one.costs.kinds["0"].options[3:]] == [
        ("host", 9, 1, False),
        ("", 0, 2, True),
        ("", 0, 2, False),
    ]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(made(), model="Other"), "the model is Net in one and Other in another"),
        (made(layers=5), "the number of segments is 4 in one and 5 in another"),
        (replace(made(), carries=("layers.0",)), "what carries decisions is"),
    ],
)
def test_other_steps_are_refused(other: Profile, why: str) -> None:
    """Profiles of different steps are not merged, and the first difference is named."""
    with pytest.raises(ArgumentError, match=why):
        made().merge(other)
