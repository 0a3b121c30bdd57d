"""What Slurm must know of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from nemo_rl_like.spec.base import Spec, form

Word = Annotated[str, form(r"^[^\s\x00-\x1f\x7f\"'`\\#]+$", "one word, without blanks, quotes, backslashes or `#`")]
"""One word of a directive: no blanks, control characters, quotes, backslashes or `#`."""
Line = Annotated[str, form(r"^[^\x00-\x1f\x7f\"\\#]*$", "one line, without double quotes, backslashes or `#`")]
"""One line of a directive: no control characters, double quotes, backslashes or `#`."""
GresType = Annotated[
    str, form(r"^[A-Za-z0-9_.-]+$", "letters, digits, `_`, `.` and `-`; the number is `launch.devices_per_node`")
]
"""Type of GPU, as in `gpu:TYPE:8`."""


class SlurmSpec(Spec):
    """Where in a Slurm cluster a job runs. Each field is a directive of sbatch(1); what it holds is checked by `sbatch --test-only`."""

    partition: Word | None = None
    """Partition; default: the cluster's."""
    account: Word | None = None
    """Account that is charged; default: the user's."""
    qos: Word | None = None
    """Quality of service; default: the account's."""
    reservation: Word | None = None
    """Reservation to run in."""
    constraint: Word | None = None
    """Features that hosts must have, for example `h100&ib`."""
    exclude: Word | None = None
    """Hosts not to use, for example `node[7-9]`."""
    exclusive: bool = False
    """No other job on the job's hosts."""
    gres_type: GresType | None = None
    """Type of GPU, as in `gpu:TYPE:8`; default: any."""
    comment: Line | None = None
    """Words that accounting keeps."""
    mail_user: Word | None = None
    """Who is written to."""
    mail_type: tuple[
        Literal["BEGIN", "END", "FAIL", "REQUEUE", "TIME_LIMIT", "TIME_LIMIT_80", "TIME_LIMIT_90", "ALL"], ...
    ] = ()
    """On what; needs `mail_user`."""
