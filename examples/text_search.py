"""Search in text on hand: the standard library's docstrings and this package's own, as vectors, by cosine_topk.

    python examples/text_search.py --json search.json --plot search.png

Texts are the docstrings of the standard library's modules, classes and functions, and of prequal's, and the paragraphs
of docs/ and README.md where those lie beside this file. scikit-learn hashes their words to TF-IDF vectors of --width
numbers. Every text is looked for by a few of its own words, and should find itself.

Answers come before times: what cosine_topk and CorpusIndex find is compared with exact scores, of float64. Then all are
timed beside torch's product and topk, in turns. Exits 1 where an answer is wrong.
"""

from __future__ import annotations

import argparse
import ast
import json
import pathlib
import platform
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import prequal
from prequal.bench.program import a_file, add_device, device_named, fill_numbers, in_turns, who_answers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
QUESTIONS = (
    "parse command line arguments",
    "open a url and read the response",
    "nearest neighbours of points",
    "compress bytes",
    "run a coroutine until it is done",
    "why the reference answered and not the kernel",
)
VARIANTS = {
    "torch": "torch, product and topk",
    "cosine_topk": "cosine_topk",
    "index": "CorpusIndex",
    "rerank": "CorpusIndex, re-ranked",
}
RERANK = 32


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- text ------------------------------------------------------------------------------------------------------------


def docstrings(path: pathlib.Path, module: str) -> Iterator[tuple[str, str]]:
    """(name, text) of a module, its classes and functions, read from its source: nothing is imported or run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # files that are kept to be refused
        return
    holders: list[tuple[str, Any]] = [(module, tree)]
    while holders:
        name, node = holders.pop()
        if text := ast.get_docstring(node):
            yield name, text
        inside = (
            child for child in node.body if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        )
        holders += [(f"{name}.{child.name}", child) for child in inside]


def sources(quick: bool) -> Iterator[tuple[str, pathlib.Path]]:
    """(module, file), in the order of their names."""
    own = pathlib.Path(prequal.__file__).parent
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    for root, prefix in ((own, "prequal."), (library, "")):
        for path in sorted(root.rglob("*.py") if prefix or not quick else root.glob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(parts):
                yield prefix + ".".join(parts).removesuffix(".__init__"), path


def paragraphs() -> Iterator[tuple[str, str]]:
    root = pathlib.Path(__file__).resolve().parent.parent
    for path in sorted([root / "README.md", *(root / "docs").glob("*.md")]):
        if path.is_file():
            for number, text in enumerate(re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))):
                yield f"{path.name}, paragraph {number + 1}", text


def texts(quick: bool) -> tuple[list[str], list[str]]:
    """(names, texts), without those of fewer than four words, and each text once."""
    found: dict[str, str] = {}
    for module, path in sources(quick):
        for name, text in docstrings(path, module):
            found.setdefault(text, name)
    for name, text in paragraphs():
        found.setdefault(text, name)
    kept = {text: name for text, name in found.items() if len(re.findall(r"\w+", text)) >= 4}
    return list(kept.values()), list(kept)


def some_words(text: str, count: int, seed: int) -> str:
    """Of a text, in any order: what somebody remembers of it."""
    words = sorted(set(re.findall(r"\w\w+", text.lower())))
    return " ".join(random.Random(seed).sample(words, min(count, len(words))))


class Vectors:
    """Texts to rows of `width` numbers: words and pairs of them hashed to a place and a sign, rare ones weigh more."""

    def __init__(self, corpus: list[str], width: int) -> None:
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer

        self.hashed = HashingVectorizer(n_features=width, ngram_range=(1, 2), norm=None)
        self.weights = TfidfTransformer()
        self.corpus = self.dense(self.weights.fit_transform(self.hashed.transform(corpus)))

    def of(self, texts: list[str]) -> Tensor:
        return self.dense(self.weights.transform(self.hashed.transform(texts)))

    @staticmethod
    def dense(matrix: Any) -> Tensor:
        return torch.from_numpy(matrix.toarray()).float()


# ---- answers first ---------------------------------------------------------------------------------------------------


def exact_scores(queries: Tensor, corpus: Tensor) -> Tensor:
    """[Q, C] float64, cosines of the vectors as they are stored."""
    q, rows = queries.double(), corpus.double()
    return torch.nn.functional.normalize(q) @ torch.nn.functional.normalize(rows).t()


def searches(corpus: Tensor, k: int) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    index = prequal.CorpusIndex(corpus)
    unit = torch.nn.functional.normalize(corpus)

    def by_torch(queries: Tensor) -> tuple[Tensor, Tensor]:
        scores, idx = (torch.nn.functional.normalize(queries) @ unit.t()).topk(k)
        return scores, idx

    return {
        "torch": by_torch,
        "cosine_topk": lambda queries: prequal.cosine_topk(queries, corpus, k),
        "index": lambda queries: index.topk(queries, k),
        "rerank": lambda queries: index.topk(queries, k, rerank=RERANK),
    }


def judged(found: tuple[Tensor, Tensor], exact: Tensor, width: int) -> dict[str, Any]:
    """How far scores are off, how many of the exact best were found, and what breaks the bound of cosine_topk."""
    scores, idx = (x.cpu() for x in found)
    k = idx.shape[1]
    bound = (width + 8) * 2.0**-23
    of_found = exact.gather(1, idx)
    best = exact.topk(k, dim=1)
    off = (scores.double() - of_found).abs().amax().item()
    wrong = []
    if not off <= bound:
        wrong.append(f"scores: off by {off:.2e}, bound {bound:.2e}")
    # what was left out is no better than what was taken, by more than two such bounds
    short = (best.values[:, -1] - of_found.amin(1)).amax().item()
    if not short <= 2 * bound:
        wrong.append(f"rows: a better one was left out, by {short:.2e}, bound {2 * bound:.2e}")
    if not (scores[:, 1:] <= scores[:, :-1]).all():
        wrong.append("scores: not in descending order")
    recall = (idx.unsqueeze(2) == best.indices.unsqueeze(1)).any(2).double().mean().item()
    return {"largest_error": off, "bound": bound, "recall": recall, "wrong": wrong}


# ---- then times ------------------------------------------------------------------------------------------------------


# ---- telling ---------------------------------------------------------------------------------------------------------


def table(answers: Mapping[str, Mapping[str, Any]], times: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'':<26}{'largest error':>14}{'recall':>9}{'device ms':>11}{'peak MB':>9}"]
    for name, row in answers.items():
        device, peak = "–", "–"
        if name in times:
            device = f"{times[name]['device_us']['median'] / 1e3:.3f}"
            peak = "–" if times[name]["peak_bytes"] is None else f"{times[name]['peak_bytes'] / 1e6:.1f}"
        lines.append(f"{VARIANTS[name]:<26}{row['largest_error']:>14.2e}{row['recall']:>9.4f}{device:>11}{peak:>9}")
        lines += [f"    WRONG {wrong}" for wrong in row["wrong"]]
    return "\n".join(lines)


def plot(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    words = [int(count) for count in result["found_itself"]]
    for place, style in (
        ("first", {"color": "#0072B2", "marker": "o"}),
        ("among k", {"color": "#E69F00", "marker": "x"}),
    ):
        left.plot(words, [row[place] for row in result["found_itself"].values()], label=place, **style)
    left.set_xlabel("words of the text that is looked for")
    left.set_ylabel("share of texts that find themselves")
    left.set_ylim(0, 1.05)
    left.legend(frameon=False)
    names = list(result["times"])
    heights = [result["times"][name]["device_us"]["median"] / 1e3 for name in names]
    right.bar(range(len(names)), heights, color="#0072B2")
    right.set_xticks(range(len(names)), [VARIANTS[name].replace(", ", ",\n") for name in names])
    right.set_ylabel(f"ms for {result['queries']} queries")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(result["title"], fontsize=10)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


# ---- the program -----------------------------------------------------------------------------------------------------


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_device(parser)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--width", type=int, default=None, help="numbers a text: 1,024; 128 with --quick")
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument(
        "--queries", type=int, default=None, help="texts that look for themselves: 1,024; 64 with --quick"
    )
    parser.add_argument("--quick", action="store_true", help="fewer modules, narrow vectors, few runs")
    parser.add_argument("--rounds", type=int, default=None, help="5; 2 with --quick")
    parser.add_argument("--runs", type=int, default=None, help="of each variant, a round: 20; 2 with --quick")
    parser.add_argument("--json", type=a_file, help="write all figures here")
    parser.add_argument("--plot", type=a_file, help="write a PNG of what was found, and of times, here")
    args = parser.parse_args(argv)
    fill_numbers(parser, args, {"width": (1024, 128), "queries": (1024, 64), "rounds": (5, 2), "runs": (20, 2)})
    if not 1 <= args.k <= 128:
        parser.error(f"--k: expected 1 to 128, got {args.k}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    device = device_named(args.device)
    where, dtype = torch.device(args.device), DTYPES[args.dtype]
    progress("reading docstrings")
    names, corpus_texts = texts(args.quick)
    vectors = Vectors(corpus_texts, args.width)
    corpus = vectors.corpus.to(where, dtype)
    k = min(args.k, len(names))
    progress(f"{len(names)} texts of {args.width} numbers")

    chosen_rows = random.Random(0).sample(range(len(names)), min(args.queries, len(names)))
    by_name = searches(corpus, k)
    found_itself = {}
    for words in (2, 4, 8, 16):
        queries = vectors.of([some_words(corpus_texts[row], words, row) for row in chosen_rows]).to(where, dtype)
        hits = by_name["index"](queries)[1].cpu() == torch.tensor(chosen_rows).unsqueeze(1)
        found_itself[words] = {
            "first": hits[:, 0].double().mean().item(),
            "among k": hits.any(1).double().mean().item(),
        }

    exact = exact_scores(queries.cpu(), corpus.cpu())
    answers = {name: judged(search(queries), exact, args.width) for name, search in by_name.items()}
    answers["torch"]["wrong"] = []  # scores in the dtype of the vectors: told, and not held to a bound of ours
    right = [name for name in by_name if not answers[name]["wrong"]]
    progress("timing")
    times = in_turns(device, {name: lambda s=by_name[name]: s(queries) for name in right}, args.rounds, args.runs)

    asked = by_name["index"](vectors.of(list(QUESTIONS)).to(where, dtype))
    answered = {
        question: [{"name": names[row], "score": score} for score, row in zip(scores, rows, strict=True)]
        for question, scores, rows in zip(QUESTIONS, *(x[:, :3].tolist() for x in asked), strict=True)
    }
    title = f"{len(names)} docstrings and paragraphs, {args.width} numbers each, {args.dtype}, {device.name}"
    result: dict[str, Any] = {
        "schema": 1,
        "title": title,
        "device": device.name,
        "arguments": {name: value for name, value in vars(args).items() if name not in ("json", "plot")},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "prequal": prequal.__version__},
        "texts": len(names),
        "queries": len(chosen_rows),
        "found_itself": found_itself,
        "answers": answers,
        "times": times,
        "paths": who_answers(lambda: by_name["index"](queries)),
        "answered": answered,
    }
    print(f"{title}\n")
    for question, rows in answered.items():
        print(f"{question}?\n" + "\n".join(f"    {row['score']:.3f}  {row['name']}" for row in rows))
    print(f"\n{len(chosen_rows)} texts looked for by some of their words; found first, and among {k}:")
    for words, shares in found_itself.items():
        print(f"  {words:>2} words  {shares['first']:.3f}  {shares['among k']:.3f}")
    print(f"\n{table(answers, times)}")
    print("\nwho answers: " + ", ".join(f"{op} {path}" for op, path in sorted(result["paths"].items())))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    if args.plot:
        plot(args.plot, result)
        progress(f"wrote {args.plot}")
    failed = [name for name, row in answers.items() if row["wrong"]]
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
