import asyncio
import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import msgspec
import pytest

from miles.contracts.types import Sample
from miles.rollout.rewards import grader_pool
from miles.rollout.rewards.score import make_reward, score
from miles.rollout.rewards.table import REWARDS, boxed, check
from tests.unit.rollout.scripted import made_config, made_prompt

GYM = {"prompt_data": "reasoning_gym:chain_sum"}


def reward_of(
    tokenizer: Any, rm_type: str, response: str, label: str | None = None, **changes: Any
) -> Any:
    metadata = changes.pop("metadata", {})
    prompt = made_prompt(0, tokenizer, "q", label=label, metadata=metadata)
    sample = Sample(prompt=prompt, index=0, tokens=[1, 2], response=response)
    config = made_config(rm_type=rm_type, **{"rm_default": -1.0, **changes})
    asyncio.run(score([sample], make_reward(config, tokenizer)))
    return sample.reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("the answer is 42.", "42", 1.0),
        (r"so \boxed{\frac{1}{2}}<|im_end|>", "0.5", 1.0),
        (r"\boxed{1/2}", r"\frac12", 1.0),
        (r"first 41, then \boxed{42}", "41", 0.0),
        ("2 + 2 = 4", "#### 4", 1.0),
        ("72", "She sold 72.\n#### 72", 1.0),
        ("$x^2+2x+1$", "$(x+1)^2$", 1.0),
        ("no idea", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_compares_values_not_texts(
    tokenizer: Any, response: str, label: str, reward: float
) -> None:
    assert reward_of(tokenizer, "math", response, label) == reward


def test_boxed_looks_only_into_the_box(tokenizer: Any) -> None:
    assert reward_of(tokenizer, "boxed_math", r"\boxed{41} or 42", "42") == 0.0
    assert reward_of(tokenizer, "boxed_exact_match", r"x \boxed{ 42 } y", "42") == 1.0
    assert reward_of(tokenizer, "boxed_exact_match", "42", "42") == 0.0


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"\boxed{a} \boxed{b}", "b"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {x}", "x"),
        (r"\boxed{done} \boxed{cut off", "done"),
        ("none", None),
    ],
)
def test_the_last_complete_box_counts(text: str, inner: str | None) -> None:
    assert boxed(text) == inner


def test_a_grader_that_hangs_is_killed_and_the_next_answer_is_graded(
    tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert reward_of(tokenizer, "math", "1", "1") == 1.0
    # A tower of powers whose exact value would need more digits than there is memory for.
    endless = "9^{9^{9^{9}}} - 9^{9^{9^{9}}} + 1"
    changes = {"rm_timeout_s": 1.0}
    assert reward_of(tokenizer, "math", f"${endless}$", "1", **changes) == -1.0
    assert "TimeoutError: the grader gave no verdict in 1 s" in caplog.text
    assert reward_of(tokenizer, "math", "1", "1") == 1.0


def test_graders_end_with_their_pool() -> None:
    pool = grader_pool.GraderPool(1)
    job = {"kind": "math", "answer": "4", "label": "4"}
    assert pool.run(job, 120.0) == {"score": 1.0}
    (grader,) = pool._graders  # pyright: ignore[reportPrivateUsage]
    process = grader._process  # pyright: ignore[reportPrivateUsage]
    pool.close()
    assert process.poll() is not None


def test_a_label_that_is_no_mathematics_gives_no_verdict(tokenizer: Any) -> None:
    assert reward_of(tokenizer, "math", "4", "$$") == -1.0
    assert reward_of(tokenizer, "math", "4", None) == -1.0


def test_reasoning_gym_grades_with_the_familys_own_grader(tokenizer: Any) -> None:
    import reasoning_gym

    recipe = {"family": "chain_sum", "kwargs": {"size": 3, "seed": 7}, "index": 2}
    right = reasoning_gym.create_dataset("chain_sum", size=3, seed=7)[2]["answer"]
    made = {"metadata": {"reasoning_gym": recipe}}
    assert reward_of(tokenizer, "reasoning_gym", f"{right}<eos>", **made) == 1.0
    tagged = f"let me see 12 <answer>{right}</answer>"
    assert reward_of(tokenizer, "reasoning_gym", tagged, **made) == 1.0
    assert reward_of(tokenizer, "reasoning_gym", f"{int(right) + 1}", **made) < 0.1
    of_a_file = {"metadata": {"source_dataset": "chain_sum"}, "label": right}
    assert reward_of(tokenizer, "reasoning_gym", right, **of_a_file) == 1.0
    # This family's grader raises on what is not a list of factors: a wrong answer.
    recipe = {"family": "prime_factorization", "kwargs": {"size": 1, "seed": 0}, "index": 0}
    made = {"metadata": {"reasoning_gym": recipe}}
    assert reward_of(tokenizer, "reasoning_gym", "junk × x", **made) == 0.0
    assert reward_of(tokenizer, "reasoning_gym", "4", "4") == -1.0


@pytest.mark.parametrize(
    ("response", "label", "f1"),
    [
        ("The cat sat.", "a cat sat", 1.0),
        ("cat", "cat dog", 2 / 3),
        ("b b c", "b d", 2 / 5),
        ("x", "y", 0.0),
        ("", "", 1.0),
        ("", "y", 0.0),
    ],
)
def test_f1_of_words(tokenizer: Any, response: str, label: str, f1: float) -> None:
    assert reward_of(tokenizer, "f1", response, label) == pytest.approx(f1)


def test_exact_match_ignores_white_space_and_end_tokens_only(tokenizer: Any) -> None:
    assert reward_of(tokenizer, "exact_match", " 4321 <eos>", "4321") == 1.0
    assert reward_of(tokenizer, "exact_match", "4321\n<|im_end|><eos>", "4321") == 1.0
    assert reward_of(tokenizer, "exact_match", "4321.", "4321") == 0.0


def test_deterministic_random_is_the_documented_hash(tokenizer: Any) -> None:
    for response in ("a", "b", "c", "d"):
        wanted = hashlib.sha256(("[1, 2]" + response).encode()).digest()[0] % 2
        assert reward_of(tokenizer, "deterministic_random", response) == wanted
    rewards = {reward_of(tokenizer, "random", "a") for _ in range(40)}
    assert rewards == {0.0, 1.0}


@pytest.fixture
def remote() -> Iterator[tuple[str, list[Any]]]:
    """A reward server: 0.5, an object, or an error, as the response asks."""
    bodies = list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = msgspec.json.decode(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            answer = {"object": b'{"score": 0.25}'}.get(body["response"], b"0.5")
            self.send_response(500 if body["response"] == "error" else 200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/rm", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_remote_reward_gets_prompt_response_and_label(
    tokenizer: Any, remote: tuple[str, list[Any]]
) -> None:
    url, bodies = remote
    changes = {"rm_url": url, "reward_key": "score"}
    assert reward_of(tokenizer, "remote_rm", "r<eos>", "l", **changes) == 0.5
    assert bodies == [{"prompt": "q", "response": "r", "label": "l"}]
    assert reward_of(tokenizer, "remote_rm", "object", "l", **changes) == {"score": 0.25}
    assert reward_of(tokenizer, "remote_rm", "error", "l", **changes) == -1.0


def test_every_entry_of_the_table_can_be_loaded() -> None:
    for name in REWARDS:
        assert callable(REWARDS.load(name))


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"rm_type": "maths"}, "--rm-type"),
        ({"rm_type": "boxed_math"}, "--label-key"),
        ({"rm_type": "f1", **GYM, "eval_prompt_data": ("a", "a.jsonl")}, "--eval-label-key"),
        ({"rm_type": "remote_rm"}, "--rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "localhost:8000/rm"}, "--rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "ftp://host/rm"}, "--rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "http:///rm"}, "--rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "http://host:port/rm"}, "--rm-url"),
        ({"rm_type": "remote_rm", "rm_url": "http://[::1/rm"}, "--rm-url"),
        ({"rm_type": "random", "group_rm": True}, "--group-rm"),
    ],
)
def test_reward_flags_that_cannot_work_are_refused(changes: dict[str, Any], flag: str) -> None:
    (problem,) = check(made_config(**changes))
    assert problem.flag == flag


@pytest.mark.parametrize("url", ["http://localhost:8000/rm", "https://a.b/c?d=e", "http://[::1]:9"])
def test_an_address_of_the_web_is_a_remote_reward(url: str) -> None:
    assert check(made_config(rm_type="remote_rm", rm_url=url)) == []


def test_a_misspelt_reward_comes_with_the_nearest_one() -> None:
    (problem,) = check(made_config(rm_type="exact-match"))
    assert problem.remedy.endswith("did you mean exact_match?")
