"""Counts the bytes alive over a training step and draws them: every example of the gallery ends with its picture.

`measure` counts bytes after each operation, the same on any machine. The picture is an SVG, and no package is needed to
write it. It has its own background, and follows the reader's preference for light or dark.
"""

from typing import NamedTuple

import torch

from torch_recompute import measure

MIB = 2**20
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, COLUMNS = 760, 300, 66, 736, 74, 252, 320
STYLE = """
svg { font: 14px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif }
.card { fill: #ffffff; stroke: #d0d7de } .text { fill: #1f2328 } .soft { fill: #59636e; font-size: 13px }
.grid { stroke: #d8dee4 } .limit { stroke: #1f2328; stroke-dasharray: 5 4; fill: none }
.c0 { fill: #ffe3b8; stroke: #c27a10 } .c1 { fill: #2f6fbe; stroke: #1d4f91 } .c2 { fill: #2b7a44; stroke: #1b5a30 }
@media (prefers-color-scheme: dark) {
.card { fill: #161b22; stroke: #30363d } .text { fill: #e6edf3 } .soft { fill: #9da7b1 }
.grid { stroke: #2b323b } .limit { stroke: #e6edf3 }
.c0 { fill: #5a3c10; stroke: #e0a040 } .c1 { fill: #4a8edb; stroke: #8abcf5 } .c2 { fill: #4cae6b; stroke: #8fd6a6 }
}
"""


class Run(NamedTuple):
    """What was counted: the loss of each step, the most bytes alive at once, and the bytes after each operation."""

    losses: list
    peak: int
    bytes: list


def watch(model, loss_of, batches, meter=None):
    """Trains the model with AdamW, a step for each batch, counts all but the first, and puts the weights back.

    A meter of elastic regions is given the same count.
    """
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    losses = []
    torch.manual_seed(0)  # the same dropout in every run
    with measure(model, optimizer) as memory:
        if meter is not None:
            meter.measurement = memory
        for batch in batches:
            loss = loss_of(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == 1:
                first = len(memory.timeline)  # from here on the optimizer has its state
    model.load_state_dict(start)
    alive = [sample.live_bytes for sample in memory.timeline[first:]]
    return Run(losses, max(alive), alive)


def finish(path, title, runs, limit=None, steps="one step"):
    """Prints the peak and the last loss of each run, writes the picture, and returns the runs."""
    for name, run in runs.items():
        print(f"{name}: peak {run.peak / MIB:.1f} MiB, loss {run.losses[-1]:.6f}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(svg(title, runs, limit, steps))
    return runs


def svg(title, runs, limit=None, steps="one step"):
    """Returns the picture of up to three runs, by name, and of a limit in bytes."""
    top = 1.06 * max(limit or 0, *(run.peak for run in runs.values()))
    tick = next(m * 10**e for e in range(-2, 9) for m in (1, 2, 5) if top < 6 * m * 10**e * MIB)

    def y(count):
        return round(BOTTOM - (BOTTOM - TOP) * count / top, 1)

    def text(x, y, words, kind="soft", anchor="start"):
        return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'

    def area(counts, kind):
        """A curve of at most `COLUMNS` steps across the whole picture, each as high as the most bytes in it."""
        columns, path = min(COLUMNS, len(counts)), f"M{LEFT} {BOTTOM}"
        for column in range(columns):
            most = max(counts[len(counts) * column // columns : len(counts) * (column + 1) // columns])
            path += f"V{y(most):g}H{LEFT + (RIGHT - LEFT) * (column + 1) / columns:.0f}"
        return f'<path class="{kind}" d="{path}V{BOTTOM}z"/>'

    drawn = [
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        text(18, 28, title, "text"),
    ]
    x = 18
    for place, (name, run) in enumerate(runs.items()):
        words = f"{name}: {run.peak / MIB:.1f} MiB"
        drawn.append(f'<circle class="c{place}" cx="{x + 6}" cy="48" r="6"/>')
        drawn.append(text(x + 20, 53, words, "text"))
        x += 30 + 8 * len(words)
    for place in range(int(top / MIB / tick) + 1):
        at = y(place * tick * MIB)
        drawn.append(f'<path class="grid" d="M{LEFT} {at:g}H{RIGHT}"/>')
        drawn.append(text(LEFT - 8, at + 4, f"{place * tick:g}", anchor="end"))
    drawn += [area(run.bytes, f"c{place}") for place, run in enumerate(runs.values())]
    if limit:
        drawn.append(f'<path class="limit" d="M{LEFT} {y(limit):g}H{RIGHT}"/>')
        drawn.append(text(RIGHT - 6, y(limit) - 7, f"at most {limit / MIB:.1f} MiB", "text", "end"))
    drawn.append(text(18, BOTTOM + 32, "MiB alive"))
    drawn.append(text(RIGHT, BOTTOM + 32, f"{steps}, from the first operation to the last", anchor="end"))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{title}</title>\n<style>{STYLE}</style>\n'
    )
    return head + "\n".join(drawn) + "\n</svg>\n"
