"""What got slower between two commits: make bench-compare A=main~5 B=HEAD, or python -m benchmarks.compare A B

Each commit runs in a process of its own, from a work tree of its own. Both processes live side by side and take turns
measure by measure (A B, B A, A B …), so that what else the machine does hits both. A measure is slower or faster if the
95 % interval of the ratio over the turns leaves 1 out and the ratio is beyond `NOISE`.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

NOISE = 0.03
"""smallest change that is called one"""
RESAMPLES = 2000
WORK = "--work"


def measures() -> dict[str, Callable[[], object]]:
    """What is timed, by the package's public functions, which both commits have"""
    from importlib import resources

    import torch

    import haav
    from haav.photos.images import load_image

    torch.manual_seed(0)
    captioner = haav.load()
    samples = resources.files("haav").joinpath("samples")
    paths = sorted(str(file) for file in samples.iterdir() if file.name.endswith(".jpg"))
    images = [load_image(path) for path in paths]
    eight = [images[index % len(images)] for index in range(8)]
    one, many = captioner.extract(images[:1]), captioner.extract(eight)
    options = haav.CaptionOptions(beam=3)
    return {
        "photo to caption, beam 3": lambda: captioner.caption(paths[0], beam=3),
        "views to caption, beam 3, one photo": lambda: captioner.caption_extracted(one, options),
        "views to captions, beam 5, eight photos": lambda: captioner.caption_extracted(many),
        "views of eight photos": lambda: captioner.extract(eight),
        "sixteen photos to captions": lambda: captioner.caption(eight * 2),
    }


def work() -> None:
    """Answer each name on standard input with the seconds that the measure took. The first answer is the names."""
    known = measures()
    for measure in known.values():
        measure()  # warm up
    print(json.dumps(list(known)), flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        known[line.strip()]()
        print(time.perf_counter() - started, flush=True)


class Commit:
    """A process that runs the code of a commit"""

    def __init__(self, tree: Path) -> None:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tree / 'src')!r})\n" + RUN, WORK]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.names: list[str] = json.loads(self._answer())

    def seconds(self, measure: str) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{measure}\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a commit failed to run; its message is above.")
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


RUN = f"import runpy; runpy.run_path({str(Path(__file__).resolve())!r}, run_name='__main__')"


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        known = subprocess.run(["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"], capture_output=True)
        if known.returncode:
            raise SystemExit(f"'{commit}' is no commit of this repository. Name two, e.g. A=HEAD~5 B=HEAD")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)


def take_turns(first: Commit, second: Commit, rounds: int) -> dict[str, list[tuple[float, float]]]:
    shared = [name for name in first.names if name in second.names]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in shared}
    for turn in range(rounds):
        for name in shared:
            if turn % 2:
                after = second.seconds(name)
                seconds[name].append((first.seconds(name), after))
            else:
                before = first.seconds(name)
                seconds[name].append((before, second.seconds(name)))
    return seconds


def judge(pairs: Sequence[tuple[float, float]], seed: int = 0) -> dict[str, Any]:
    """The median ratio of the second to the first, its 95 % interval by bootstrap over turns, and a verdict"""
    ratios = np.log([after / before for before, after in pairs])
    rng = np.random.default_rng(seed)
    medians = np.median(ratios[rng.integers(len(ratios), size=(RESAMPLES, len(ratios)))], axis=1)
    low, high = np.exp(np.percentile(medians, [2.5, 97.5]))
    ratio = math.exp(float(np.median(ratios)))
    verdict = "same"
    if low > 1 and ratio > 1 + NOISE:
        verdict = "slower"
    elif high < 1 and ratio < 1 / (1 + NOISE):
        verdict = "faster"
    before, after = np.median(np.array(pairs), axis=0)
    return {
        "before, ms": 1000 * float(before),
        "after, ms": 1000 * float(after),
        "ratio": ratio,
        "low": float(low),
        "high": float(high),
        "verdict": verdict,
    }


def report(results: Mapping[str, Mapping[str, Any]]) -> None:
    for name, result in results.items():
        times = f"{result['before, ms']:.1f} → {result['after, ms']:.1f} ms"
        interval = f"{result['ratio']:.3f} × ({result['low']:.3f} … {result['high']:.3f})"
        print(f"{result['verdict']:7} {name}: {times}, {interval}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", help="another")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each measure (default: 20)")
    parser.add_argument("--json", help="file for the result")
    options = parser.parse_args()
    if options.rounds < 5:
        parser.error(f"--rounds must be at least 5, not {options.rounds}.")
    with ExitStack() as stack:
        commits = [Commit(stack.enter_context(tree_of(name))) for name in (options.before, options.after)]
        for commit in commits:
            stack.callback(commit.close)
        pairs = take_turns(*commits, options.rounds)
    results = {name: judge(turns) for name, turns in pairs.items()}
    report(results)
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(any(result["verdict"] == "slower" for result in results.values()))


if __name__ == "__main__":
    if sys.argv[1:] == [WORK]:
        work()
    else:
        raise SystemExit(main())
