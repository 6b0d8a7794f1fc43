"""The grader's own verdicts, without its process."""

from typing import Any

from miles.rollout.rewards.grader import run_job


def job(answer: str, right_answer: str) -> dict[str, Any]:
    return {
        "kind": "reasoning_gym",
        "prepare": False,
        "family": "prime_factorization",
        "answer": answer,
        "entry": {"question": "factor 6", "answer": right_answer, "metadata": {}},
    }


def test_an_answer_on_which_a_grader_raises_is_wrong() -> None:
    assert run_job(job("junk × more", "2 × 3")) == {"score": 0.0}


def test_an_entry_whose_own_answer_cannot_be_scored_is_an_error_and_not_a_zero() -> None:
    assert "error" in run_job(job("2 × 3", "two times three"))
