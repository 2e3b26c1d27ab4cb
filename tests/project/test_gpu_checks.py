"""The checks of `make test-gpu`, as far as a machine without a device can say something of them."""

import json

import pytest

import gpu_checks
from gpu_checks import CHECKS, Check, NotPossible, Slow, main, one, run


def test_without_a_device_nothing_is_passed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a device says so, runs none of the checks, and the exit status is 0."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 0
    said = capsys.readouterr().out
    assert f"0 of {len(CHECKS)} checks ran, none is passed" in said


@pytest.mark.nightly
@pytest.mark.parametrize("chosen", [c for c in CHECKS if c.acts], ids=lambda c: c.title)
def test_what_a_cpu_can_act_is_right_there(chosen: Check) -> None:
    """The checks themselves run: on a CPU, at a small size, each finds what it looks for."""
    found = one(chosen.number, "cpu")
    assert found["verdict"] in ("acted", "not possible"), found["note"]


def test_each_verdict_and_the_exit_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What raises has failed, what is slow or not possible says so; failed and slow ones make the exit status 1."""

    def raises(error: Exception) -> Check:
        def body(on: str) -> str:
            raise error

        return Check(1, "raises", body, True)

    for error, verdict, status in (
        (AssertionError("no"), "failed", 1),
        (Slow("2.0, stated 1.0"), "slow", 1),
        (NotPossible("one device"), "not possible", 0),
    ):
        monkeypatch.setattr(gpu_checks, "CHECKS", [raises(error)])
        monkeypatch.setattr(gpu_checks, "run", lambda chosen, on: one(chosen.number, on))
        assert main(["--on", "cpu"]) == status
        said = capsys.readouterr().out
        assert f" 1  {verdict}" in said
        assert str(error) in said


def test_a_process_that_dies_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """A segmentation fault or a lost context ends one check, not the table."""
    monkeypatch.setattr(gpu_checks.sys, "executable", "/bin/false")
    assert run(CHECKS[0], "cpu") == {"verdict": "failed", "note": "the process died with 1: "}


def test_the_answer_of_a_process_is_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch prints before it does not count."""

    class Done:
        stdout = "a warning\n" + json.dumps({"verdict": "passed", "note": "x"}) + "\n"
        stderr = ""
        returncode = 0

    monkeypatch.setattr(gpu_checks.subprocess, "run", lambda *_, **__: Done())
    assert run(CHECKS[0], "cuda") == {"verdict": "passed", "note": "x"}
