"""Run by the tests in NeMo-Run's own environment: submits a job and tells of it in JSON. `python nemo_run_program.py SPEC FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_rl_like.launch.nemo_run import NemoRunLocal
from nemo_rl_like.launch.target import Job
from nemo_rl_like.spec.loader import load_spec


def main(spec: Path, folder: Path) -> None:
    target, job = NemoRunLocal(), Job("tiny", load_spec(spec), folder, working_folder=folder)
    assert target.problems(job) == []
    rendered = target.render(job)
    before = sorted(folder.iterdir())
    target.dry_run(job, rendered)
    assert sorted(folder.iterdir()) == before
    for name, text in rendered.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    job_id = target.submit(job, rendered)
    status = target.status(job_id, folder)
    target.cancel(job_id, folder)
    told = {"state": status.state, "detail": status.detail, "code": status.exit_code}
    print("TOLD", json.dumps({**told, "lines": list(target.logs(job_id, folder, follow=True))}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
