"""What the numbers of `moemerge evaluate` are worth.

    python benchmarks/evaluate.py intervals               coverage and false alarms, in simulations
    python benchmarks/evaluate.py scorers DATA_FOLDER     our published scorers against lm-eval's

DATA_FOLDER holds gsm8k_test.jsonl.gz and math500_test.jsonl.gz. Of each problem several completions
are made from its own solution (right, wrong, cut, reworded) and judged by both.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from moemerge.lab.evaluation.significance import drawn_means, flipped_means, interval, two_sided
from moemerge.lab.verification.verifiers import check_all, make_verifier
from moemerge.text.rows import read_rows, row_fields

TRIALS, DRAWS = 2000, 1000
PROBLEMS = 1500  # of each set, for the scorers: all there are


# --- intervals ------------------------------------------------------------------------------------


def simulate(problems: int, samples: int, gain: float, seed: int) -> tuple[float, float]:
    """The share of intervals that hold the true difference, and of trials called significant.

    A problem's chance to be solved is drawn anew for each trial: most are nearly always or nearly
    never solved, as at low temperature. The second model has another chance on a tenth of them.
    """
    rng = np.random.default_rng(seed)
    covered = called = 0
    for _trial in range(TRIALS):
        chances = rng.beta(0.3, 0.3, size=(3, problems))
        changed = rng.random(problems) < 0.1
        second = np.where(changed, chances[1], chances[0])
        # On a share of problems that were not changed the second model simply knows the answer.
        knows = ~changed & (rng.random(problems) < gain)
        second = np.where(knows, 1.0, second)
        scores = rng.binomial(samples, np.stack([chances[0], second])) / samples
        truth = 0.9 * gain * 0.5  # E(1 − chance) = ½
        drawn = drawn_means(scores, DRAWS, rng)
        low, high = interval(drawn[:, 1] - drawn[:, 0])
        covered += low <= truth <= high
        gaps = scores[1] - scores[0]
        called += two_sided(float(gaps.mean()), flipped_means(gaps[None], DRAWS, rng)[:, 0]) < 0.05
    return covered / TRIALS, called / TRIALS


def intervals() -> None:
    print("problems  samples  true difference  covered  called significant")
    for problems, samples in ((164, 1), (164, 16), (500, 1), (500, 16)):
        for gain in (0.0, 0.05):
            covered, called = simulate(problems, samples, gain, seed=problems + samples)
            truth = 100 * 0.9 * gain * 0.5
            print(
                f"{problems:8}  {samples:7}  {truth:14.2f}%  {100 * covered:6.1f}%  "
                f"{100 * called:17.1f}%",
                flush=True,
            )


# --- scorers --------------------------------------------------------------------------------------

NUMBERS = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
FILTERED = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{gold}}"
generation_kwargs: {max_gen_toks: 16, until: []}
num_fewshot: 0
filter_list:
  - name: last
    filter:
      - {function: regex, group_select: -1, regex_pattern: 'PATTERN'}
      - {function: take_first}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true IGNORED}]
"""
IGNORED = r", regexes_to_ignore: [',', '\$', '\.$']"
VERIFIED = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{gold}}"
process_results: !function functions.equal
generation_kwargs: {max_gen_toks: 16, until: []}
num_fewshot: 0
metric_list: [{metric: equal, aggregation: mean, higher_is_better: true}]
"""
FUNCTIONS = """
from math_verify import parse, verify


def equal(doc, results):
    return {"equal": int(verify(parse(doc["gold"]), parse(results[0])))}
"""


def scorers(folder: Path) -> None:
    rng = random.Random(0)
    gsm8k = [row_fields(r) for r in read_rows([folder / "gsm8k_test.jsonl.gz"], PROBLEMS)]
    math500 = [row_fields(r) for r in read_rows([folder / "math500_test.jsonl.gz"], PROBLEMS)]
    number = FILTERED.replace("PATTERN", NUMBERS).replace("IGNORED", IGNORED)
    letter = FILTERED.replace("PATTERN", r"\(([A-Z])\)").replace(" IGNORED", "")
    for name, check, task, items in (
        ("GSM8K", "last-number", number, _word_problems(gsm8k, rng)),
        ("MATH-500", "bare-math", VERIFIED, _formulas(math500, rng)),
        ("CommonsenseQA", "last-choice", letter, _choices(rng)),
    ):
        verifier = make_verifier(check)
        try:
            judged = check_all(verifier, [({"answer": i["answer"]}, i["text"]) for i in items])
        finally:
            verifier.close()
        ours = [judgement.right for judgement in judged]
        theirs = _lm_eval(name, task, items)
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        print(f"{name}: {same} of {len(items)} scores are the same ({sum(ours)} right)", flush=True)


def _word_problems(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, str]]:
    items = []
    for row in rows:
        solution = re.sub(r"<<.*?>>", "", str(row["answer"]))
        steps, gold = (part.strip() for part in solution.split("####"))
        wrong = str(rng.randrange(1000))
        texts = [
            solution, f"{steps}\nThe answer is ${gold}.", f"{steps}\nThe answer is {wrong}",
            f"{gold}.00", "...", steps[: len(steps) // 2], f"It is {gold}, not {wrong}", "None.",
        ]  # fmt: skip
        items += [{"answer": row["answer"], "gold": gold, "text": text} for text in texts]
    return items


def _formulas(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, str]]:
    items = []
    for row in rows:
        other = rng.choice(rows)
        texts = [
            row["solution"], f"So it is $\\boxed{{{row['answer']}}}$.", other["solution"],
            f"The answer is ${row['answer']}$", "I do not know.",
        ]  # fmt: skip
        items += [{"answer": row["answer"], "gold": row["answer"], "text": t} for t in texts]
    return items


def _choices(rng: random.Random) -> list[dict[str, str]]:
    """No copy of CommonsenseQA is at hand: only its letters matter to the scorer."""
    items = []
    for _problem in range(PROBLEMS):
        gold, other = rng.sample("ABCDE", 2)
        texts = [
            f"The answer is ({gold})", f"({other}) seems wrong. The answer is ({gold}).",
            f"The answer is ({gold}), not ({other})", f"The answer is {gold}", f"({gold.lower()})",
            "None of them.",
        ]  # fmt: skip
        items += [{"answer": gold, "gold": gold, "text": text} for text in texts]
    return items


def _lm_eval(name: str, task: str, items: list[dict[str, str]]) -> list[bool]:
    """The same completions through lm-eval: its task, filter and metric, with texts recited."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Reciting(LM):  # type: ignore[misc,unused-ignore]
        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return [items[int(request.args[0])]["text"] for request in requests]

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    own = re.sub(r"\W", "_", name.lower())
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        data = folder / "data.jsonl"
        lines = (json.dumps({"prompt": str(n), "gold": i["gold"]}) for n, i in enumerate(items))
        data.write_text("\n".join(lines) + "\n")
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "task.yaml").write_text(task.replace("NAME", own).replace("DATA", str(data)))
        results = lm_eval.simple_evaluate(
            Reciting(),
            tasks=[own],
            task_manager=TaskManager(include_path=place, include_defaults=False),
            bootstrap_iters=0,
        )
    samples = sorted(results["samples"][own], key=lambda sample: sample["doc_id"])
    return [bool(sample[sample["metrics"][0]]) for sample in samples]


if __name__ == "__main__":
    if sys.argv[1:] == ["intervals"]:
        intervals()
    elif sys.argv[1:2] == ["scorers"] and len(sys.argv) == 3:
        scorers(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
