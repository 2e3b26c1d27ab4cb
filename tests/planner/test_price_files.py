"""Price files: prices are measured once per device, read by the next process, and measured again without the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.zoo import mean_loss
from torch_recompute._torch import function_modes
from torch_recompute.planner import prices
from torch_recompute.planner.ops import Meta, Op
from torch_recompute.planner.planner import Planner
from torch_recompute.planner.prices import Measured, key_of, processor
from torch_recompute.simulation.devices import Host
from torch_recompute.simulation.training_step import TrainingStep
from torch_recompute.stores import measured
from torch_recompute.stores.measured import PriceFile, folder, full_name

CPU = torch.device("cpu")
SIXTEEN = Meta((16,), (1,), torch.float32)
EXP = Op(torch.ops.aten.exp.default, (SIXTEEN,), (), (SIXTEEN,), 0)
TOPK = Op(torch.ops.aten.exp.default, ("no tensor",), (), (), 0)  # cannot be run


@pytest.fixture(autouse=True)
def at(cold: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is empty, and a process that has asked for nothing."""
    monkeypatch.setattr(measured, "_said", set())
    return tmp_path / "prices"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the next process."""
    monkeypatch.setattr(Measured, "_known", {})
    prices.processor.cache_clear()


def test_measured_once_and_kept(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process reads what was measured and runs nothing; without the file it measures again."""
    ran: list[Op] = []
    run = Measured._run
    monkeypatch.setattr(Measured, "_run", lambda self, op: ran.append(op) or run(self, op))
    first = Measured(CPU)
    seconds = first(EXP)
    assert first(TOPK) > 0
    first.keep()
    assert ran == [EXP, TOPK]
    (path,) = at.iterdir()
    assert json.loads(path.read_text())["seconds"][key_of(EXP)] == seconds
    assert key_of(TOPK) not in path.read_text()

    forget(monkeypatch)
    again = Measured(CPU)
    assert again(EXP) == seconds
    assert ran == [EXP, TOPK]
    stamp = path.stat().st_mtime_ns
    again.keep()
    assert path.stat().st_mtime_ns == stamp

    path.unlink()
    forget(monkeypatch)
    Measured(CPU)(EXP)
    assert ran == [EXP, TOPK, EXP]


def test_the_processor_s_speeds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roofline of the CPU is measured once for all processes."""
    first = processor()
    forget(monkeypatch)
    monkeypatch.setattr(prices, "_seconds", lambda *_: pytest.fail("it is measured again"))
    assert processor() == first


def test_names_keep_devices_and_versions_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch, another number of threads and another device have files of their own."""
    names = {full_name(CPU)}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    names.add(full_name(CPU))
    monkeypatch.setattr(torch, "__version__", "9.9")
    names.add(full_name(CPU))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    names.add(full_name(torch.device("cuda")))
    assert len(names) == len({PriceFile(name).path for name in names}) == 4
    assert all(re.fullmatch(r"prices-[A-Za-z0-9.-]+\.json", PriceFile(name).path.name) for name in names)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"version": 1}',
        '{"version": 1, "device": "DEVICE", "seconds": {"a": "fast"}}',
        '{"version": 1, "device": "DEVICE", "seconds": {"a": -1.0}}',
        '{"version": 0, "device": "DEVICE", "seconds": {}}',
        '{"version": 1, "device": "another", "seconds": {}}',
    ],
)
def test_a_file_that_cannot_be_read_is_measured_anew(content: str) -> None:
    """It is said once, and the file is whole again afterwards."""
    found = PriceFile("DEVICE")
    found.path.parent.mkdir()
    found.path.write_text(content)
    with pytest.warns(RuntimeWarning, match=r"cannot be read \(.*\); prices are measured again and written there"):
        found = PriceFile("DEVICE")
    assert found.seconds == {}
    found.seconds["a"] = 0.5
    found.save()
    assert PriceFile("DEVICE").seconds == {"a": 0.5}


def test_processes_do_each_other_no_harm() -> None:
    """What another process wrote in between is still there after this one wrote."""
    one, other = PriceFile("DEVICE"), PriceFile("DEVICE")
    one.seconds["a"], other.seconds["b"] = 0.5, 0.25
    one.save()
    other.save()
    assert PriceFile("DEVICE").seconds == {"a": 0.5, "b": 0.25}
    assert [path.suffix for path in folder().iterdir()] == [".json"]


def test_a_folder_that_cannot_be_written_to_is_said(at: Path) -> None:
    """A file where the folder should be: a warning, and the prices are there all the same."""
    at.write_text("")
    found: Any = PriceFile("DEVICE") if not at.is_file() else None
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        found = PriceFile("DEVICE")
    found.seconds["a"] = 0.5
    with pytest.warns(RuntimeWarning, match="Prices cannot be kept in"):
        found.save()
    assert found.seconds == {"a": 0.5}


def test_the_usual_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a name of its own the folder lies where caches do."""
    monkeypatch.delenv("TORCH_RECOMPUTE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "torch-recompute"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert folder() == Path.home() / ".cache" / "torch-recompute"


SHEETS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA RTX A1000": None,
    "NVIDIA RTX A1000 Laptop GPU": None,
    "NVIDIA RTX A6000": "rtx-a6000",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": None,
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA H20": "h20",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "Tesla V100-SXM2-16GB": "v100",
    "Tesla T4": "t4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi355x",
    "AMD Instinct MI250X": None,
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
}


@pytest.mark.parametrize("name", SHEETS)
def test_a_device_has_its_own_data_sheet(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are matched by whole words; a device without a sheet says whose speeds are taken instead."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = prices.roofline_of(torch.device("cuda", 0))
    assert found.name == (SHEETS[name] or f"an h100, since no data sheet of {name} is known")


def test_products_in_32_bits_run_at_their_own_speed_unless_tf32_is_on() -> None:
    """By default a product is not computed in TF32 and a convolution is; the settings decide."""
    device, one = prices.DEVICES["h100"], Meta((1,), (1,), torch.float32)
    work = 10**15
    product = Op(torch.ops.aten.mm.default, (one, one), (), (one,), work)
    convolution = Op(torch.ops.aten.convolution.default, (one, one), (), (one,), work)
    two = Meta((1,), (1,), torch.bfloat16)
    half = Op(torch.ops.aten.mm.default, (two, two), (), (two,), work)
    before = torch.get_float32_matmul_precision()
    assert device(product) == pytest.approx(work / 67e12 / 0.7, rel=1e-3)
    assert device(convolution) == pytest.approx(work / 495e12 / 0.7, rel=1e-3)
    assert device(half) == pytest.approx(work / 989e12 / 0.7, rel=1e-3)
    try:
        torch.set_float32_matmul_precision("high")
        assert device(product) == pytest.approx(work / 495e12 / 0.7, rel=1e-3)
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_speed_of_an_operation_is_that_of_what_it_reads() -> None:
    """Attention in 16 bits has a log-sum-exp in 32 among its results, and runs at the speed of 16 all the same."""
    work, device = 10**15, prices.DEVICES["h100"]
    wide, half, eighth = (Meta((1,), (1,), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn))
    for func, read, made, speed in (
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, (half, half, half), (half, wide), 989),
        (torch.ops.aten._scaled_dot_product_flash_attention_backward.default, (half, half, wide), (half, half), 989),
        (torch.ops.aten._scaled_dot_product_efficient_attention.default, (wide, wide, wide), (wide, wide), 67),
        (torch.ops.aten.mm.dtype, (half, half), (wide,), 989),
        (torch.ops.aten._scaled_mm.default, (eighth, eighth, wide, wide), (half,), 1979),
    ):
        assert device(Op(func, read, (), made, work)) == pytest.approx(work / (speed * 1e12 * 0.7), rel=1e-3)
    older, product = prices.DEVICES["a100"], Op(torch.ops.aten._scaled_mm.default, (eighth,), (), (half,), work)
    assert older(product) == pytest.approx(work / (312e12 * 0.7), rel=1e-3)


def test_what_a_region_takes_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a replay takes besides its operations is kept with the prices, and said with them."""
    first = Measured(CPU)
    with torch.inference_mode(), torch.device("meta"):
        host = first.host
    assert min(host.region, host.replayed, host.call, host.watched) > 0
    assert not host.apart
    first.keep()
    monkeypatch.setattr(prices, "_seconds", lambda *_: pytest.fail("it is measured again"))
    assert Measured(CPU).host == host
    monkeypatch.setattr(prices, "_overhead", lambda _: Host(region=2e-4, replayed=1e-5, call=75e-6))
    words = "cpu, 0.20 ms per region, 75 us per kept call and 10 us per replayed operation"
    assert first.timing_with_regions == f"operations timed one by one on {words}"


def test_what_a_region_takes_is_measured_under_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function mode, as `with torch.device("cpu")` is one, doubles what it takes to keep a call."""
    active: list[Any] = []
    run = prices._seconds
    monkeypatch.setattr(prices, "_seconds", lambda *args: active.extend(function_modes()) or run(*args))
    assert Measured(CPU).host.region > 0
    assert not active


def test_a_region_costs_more_than_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice pays for its regions, what they run again and keep, so one large region may be better than two."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 4, 8)
    monkeypatch.setattr(prices, "_overhead", lambda _: Host(region=20.0, replayed=5.0, call=1e5))
    planner = Planner(TrainingStep(model, (x,), loss=mean_loss))
    options = [option for kind in planner.costs.kinds.values() for option in kind.options]
    assert any(option.regions for option in options)
    for option in options:
        called = sum(1 + option.span * region.nested for region in option.regions)
        kept, seconds = divmod(option.seconds, 1e5)
        assert kept >= option.span * sum(len(region.keep) for region in option.regions)
        assert bool(kept) == any(region.keep for region in option.regions)
        assert seconds >= 20.0 * called
        again = (seconds - 20.0 * called) / 5.0
        assert abs(again - round(again)) < 0.1  # operations that are run again; what they take alone is far less
    nodes = [node for kind in planner.costs.kinds.values() for node in kind.graph.nodes]
    assert all(node.operations or not node.seconds for node in nodes)  # none: the other result of an operation
    assert planner.profile.timing.startswith("operations timed one by one on cpu")
    assert "and 5000000 us per replayed operation" in planner.profile.timing
