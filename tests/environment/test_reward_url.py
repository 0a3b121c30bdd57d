"""Laws of the remote scorer, against a real HTTP server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nemo_rl_like.artifacts.errors import SpecError
from nemo_rl_like.environment.pool import EnvironmentPool
from nemo_rl_like.environment.registry import resolve
from nemo_rl_like.environment.types import EnvironmentContractError, Unscorable
from nemo_rl_like.spec.environment import EnvironmentSpec


class _Scorer(HTTPServer):
    """Gives the queued answers, then scores by length."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.queued: list[tuple[int, bytes]] = []
        self.bodies: list[dict] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Scorer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        rewards = json.dumps({"rewards": [len(r) for r in body["responses"]]}).encode()
        status, answer = self.server.queued.pop(0) if self.server.queued else (200, rewards)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


@pytest.fixture
def scorer():
    server = _Scorer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def _spec(tmp_path, url: str, **config) -> EnvironmentSpec:
    rows = [{"role": "user", "content": f"q{i}", "label": i} for i in range(4)]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    settings = {"test_fraction": 0, "validation_fraction": 0, "timeout_s": 5, "backoff_s": 0.01, **config}
    return EnvironmentSpec(reward_url=url, prompts=str(tmp_path / "p.jsonl"), config=settings)


async def _score(spec, *responses):
    tasks = {t.id: t for t in resolve(spec).tasks("train")}
    async with EnvironmentPool(spec) as pool:
        results = await pool.score([tasks[f"row-{i + 1}"] for i in range(len(responses))], responses)
        return [r.reason if isinstance(r, Unscorable) else r.reward for r in results], pool.restarts


def _url(server: _Scorer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/score"


async def test_the_scorer_gets_the_batch_and_its_numbers_are_the_rewards(tmp_path, scorer):
    assert await _score(_spec(tmp_path, _url(scorer)), "a", "bbb") == ([1.0, 3.0], 0)
    assert scorer.bodies == [{"prompts": ["q0", "q1"], "responses": ["a", "bbb"], "labels": [0, 1]}]


async def test_a_server_error_is_tried_again(tmp_path, scorer):
    scorer.queued = [(500, b""), (503, b"")]
    assert await _score(_spec(tmp_path, _url(scorer)), "a") == ([1.0], 0)
    assert len(scorer.bodies) == 3


async def test_a_scorer_that_stays_away_makes_answers_unscorable_not_zero(tmp_path, scorer):
    scorer.queued = [(500, b"")] * 2
    spec = _spec(tmp_path, _url(scorer), retries=1)
    assert await _score(spec, "a", "b") == (["scorer_unreachable"] * 2, 0)
    closed = _spec(tmp_path, "http://127.0.0.1:9/score", retries=0)
    assert await _score(closed, "a") == (["scorer_unreachable"], 0)


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (200, b"{}", 'without "rewards"'),
        (200, b"<html>", "which is not JSON"),
        (200, b'{"rewards": [1]}', "returned 1 rewards for 2 responses"),
        (404, b"", "refused the request: HTTP 404"),
    ],
)
async def test_a_scorer_that_answers_something_else_stops_the_run(tmp_path, scorer, status, answer, said):
    scorer.queued = [(status, answer)]
    with pytest.raises(EnvironmentContractError, match=said):
        await _score(_spec(tmp_path, _url(scorer)), "a", "b")


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(SpecError, match="must start with http"):
        resolve(_spec(tmp_path, "ftp://x"))
    with pytest.raises(SpecError, match=r"step_timeout_s: 30.0 s is shorter .*60\.0 s"):
        resolve(_spec(tmp_path, "http://x", timeout_s=20, backoff_s=0))
