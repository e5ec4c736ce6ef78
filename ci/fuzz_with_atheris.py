"""Runs fuzz targets under atheris, each in a process of its own, and fails if anything was found; see ci/fuzz."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent))
with atheris.instrument_imports(include=["kartifacts", "tuf", "securesystemslib"]):
    from tests.properties import fuzz_targets


def main() -> None:
    seconds, corpus, *names = sys.argv[1:]
    known = list(fuzz_targets.targets())
    fuzz_targets.remove_scratch()
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"there is no target {unknown[0]!r}: expected {', '.join(known)}")
    failed = [name for name in names or known if not passes(name, seconds, Path(corpus) / name)]
    if failed:
        raise SystemExit(f"something else than an error of ours came out of: {', '.join(failed)}")


def passes(name: str, seconds: str, corpus: Path) -> bool:
    """Fuzz one target; libFuzzer ends its process, so that what it made is removed out here."""
    corpus.mkdir(parents=True, exist_ok=True)
    print(f"== {name}", flush=True)
    options = [f"-max_total_time={seconds}", "-timeout=60", "-rss_limit_mb=2048", "-max_len=4096", "-verbosity=0"]
    command = [sys.executable, __file__, "--one", name, *options, "-print_final_stats=1", f"-artifact_prefix={corpus}/"]
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="kartifacts-fuzz-", dir=memory) as place:
        environ = {**os.environ, "TMPDIR": place}
        return subprocess.run([*command, str(corpus)], env=environ, check=False).returncode == 0


def fuzz(name: str, arguments: list[str]) -> None:
    """Hand this process to libFuzzer."""
    target = fuzz_targets.targets()[name]
    atheris.Setup([sys.argv[0], *arguments], lambda data: fuzz_targets.run(target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        fuzz(sys.argv[2], sys.argv[3:])
    else:
        main()
