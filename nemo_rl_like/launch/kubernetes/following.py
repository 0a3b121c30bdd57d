"""The driver's log through restarts: from pod to pod until the job has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.kubernetes.api import Cluster, Gone, Missing
from nemo_rl_like.launch.kubernetes.pod import Manifest
from nemo_rl_like.launch.kubernetes.state import ended, started
from nemo_rl_like.launch.target import JobStatus

logger = logging.getLogger(__name__)

WATCH_S = 30
"""Seconds of one watch; then the job's own state is read again."""
DROPS = 5
"""How often in a row the log's connection may end before its container has, with nothing read in between."""


class Following:
    """The log of a driver whose pods come and go.

    Args:
        selector: labels of the driver's pods.
        status: reads the job's state.
        watch_s: longest wait for a pod's next change before the state is read again, in seconds.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, selector: str, status: Callable[[], JobStatus], watch_s: int = WATCH_S
    ) -> None:
        self._cluster, self._namespace, self._selector = cluster, namespace, selector
        self._status, self._watch_s = status, watch_s
        self._read: set[str] = set()

    def lines(self) -> Iterator[str]:
        """Each line once, as it is written, until the job ends; a job that is queued is waited for as long as the queue holds it."""
        while True:
            over = ended(self._status())  # before the pods: one that starts in between is then not missed
            pods, version = driver_pods(self._cluster, self._namespace, self._selector)
            fresh = [p for p in pods if p["metadata"]["uid"] not in self._read and started(p)]
            for pod in fresh:
                yield from self._pod(pod)
                self._read.add(pod["metadata"]["uid"])
            if over and not fresh:
                return
            if not fresh:
                self._wait(version)

    def _pod(self, pod: Manifest) -> Iterator[str]:
        """Lines of one pod, to its end; a connection that is lost is made again where it was."""
        name, last, drops = pod["metadata"]["name"], "", 0
        while drops < DROPS:
            drops += 1
            try:
                for line in self._cluster.log(self._namespace, name, follow=True):
                    time, _, text = line.partition(" ")
                    if time > last:
                        last, drops = time, 0
                        yield text
            except Missing:
                logger.warning("pod %s was deleted; the rest of its log is lost", name)
                return
            except SubmitError as error:
                logger.warning("the log of pod %s broke off: %s", name, error)
                continue
            if self._has_ended(name):
                return
        raise SubmitError(f"the log of pod {name!r} broke off {DROPS} times in a row; see `kubectl logs {name}`")

    def _has_ended(self, name: str) -> bool:
        pods, _ = driver_pods(self._cluster, self._namespace, self._selector)
        here = [p for p in pods if p["metadata"]["name"] == name]
        return not here or here[0].get("status", {}).get("phase") in ("Succeeded", "Failed")

    def _wait(self, version: str) -> None:
        """Until a pod changes, at most one watch long; a version that is too old means that much has."""
        try:
            for _ in self._cluster.watch_pods(self._namespace, self._selector, version, self._watch_s):
                return
        except Gone:
            logger.info("the watch of pods is too old; listing them again")


def driver_pods(cluster: Cluster, namespace: str, selector: str) -> tuple[list[Manifest], str]:
    """The driver's pods, the oldest first, and the resource version. Of those of one second, failed ones came before the one that goes on."""
    pods, version = cluster.pods(namespace, selector)

    def age(pod: Manifest) -> tuple[str, bool, bool]:
        phase = pod.get("status", {}).get("phase")
        return pod["metadata"]["creationTimestamp"], phase != "Failed", phase != "Succeeded"

    return sorted(pods, key=age), version
