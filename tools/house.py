"""Prints the sizes of the package: code lines by room, the longest files and functions, tests beside source.

    python tools/house.py   # `make house`

Nothing tests these figures: a limit on lines shortens sentences and names in place of removing ideas. They are for
whoever wants to know where the package has grown. A code line has a token that belongs to no docstring and no comment,
so neither splitting nor joining statements changes much.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "torch_recompute"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LONGEST = 10  # files and functions that are shown


def docstring_lines(node: ast.AST) -> set[int]:
    """Returns the numbers of the lines of a node's own docstring."""
    if not isinstance(node, DOCUMENTED) or ast.get_docstring(node, clean=False) is None:
        return set()
    return set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))


def code_lines(source: str) -> int:
    """Returns the number of lines with a token that belongs to no docstring and no comment."""
    docstrings: set[int] = set().union(*(docstring_lines(node) for node in ast.walk(ast.parse(source))))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for token in tokens if token.type not in NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(code - docstrings)


def functions(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of each function without its docstring, and where it starts."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or 0) - node.lineno + 1 - len(docstring_lines(node))
            yield lines, f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno} {node.name}"


def counted(folder: Path) -> Counter[str]:
    """Returns the code lines of each file below a folder."""
    files = sorted(folder.rglob("*.py"))
    return Counter(
        {path.relative_to(folder).as_posix(): code_lines(path.read_text(encoding="utf-8")) for path in files}
    )


def printed(title: str, rows: list[tuple[int, str]]) -> Iterator[str]:
    """Yields a title and a line for each row."""
    yield f"\n{title}"
    yield from (f"{lines:8,}  {name}" for lines, name in rows)


def report() -> Iterator[str]:
    """Yields the lines of the report."""
    files, tests = counted(PACKAGE), counted(ROOT / "tests")
    rooms: Counter[str] = Counter()
    for name, lines in files.items():
        rooms[name.partition("/")[0]] += lines
    long = sorted((row for path in PACKAGE.rglob("*.py") for row in functions(path)), reverse=True)
    yield f"{files.total():,} code lines in {len(files)} files"
    yield f"{tests.total():,} code lines of tests in {len(tests)} files"
    yield from printed("rooms", [(lines, name) for name, lines in rooms.most_common()])
    yield from printed("longest files", [(lines, name) for name, lines in files.most_common(LONGEST)])
    yield from printed("longest functions, without their docstrings", long[:LONGEST])


def main() -> None:
    """Prints the report."""
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    sys.stdout.write("\n".join(report()) + "\n")


if __name__ == "__main__":
    main()
