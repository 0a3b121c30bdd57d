"""A cluster through the official client: every request has a deadline, every refusal becomes a SubmitError in words."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from nemo_rl_like.artifacts.errors import SubmitError
from nemo_rl_like.launch.kubernetes.pod import Manifest

if TYPE_CHECKING:
    from kubernetes import client as k8s

CONNECT_S = 10.0
"""Longest wait for a connection to the API server, in seconds."""
READ_S = 60.0
"""Longest wait for an answer, in seconds."""
LOG_SILENCE_S = 120.0
"""How long a followed log may be silent before it is asked for again, in seconds."""


class Gone(Exception):
    """A watch's resource version is older than what the server keeps: list again."""


class Missing(SubmitError):
    """The object is not there."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object and where the API has it."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        """As manifests write it."""
        return f"{self.group}/{self.version}" if self.group else self.version


KINDS = (
    Kind("", "v1", "configmaps", "ConfigMap"),
    Kind("", "v1", "services", "Service"),
    Kind("", "v1", "secrets", "Secret"),
    Kind("batch", "v1", "jobs", "Job"),
    Kind("ray.io", "v1", "rayjobs", "RayJob"),
    Kind("ray.io", "v1", "rayclusters", "RayCluster"),
    Kind("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet"),
    Kind("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
)
BY_KIND = {kind.kind: kind for kind in KINDS}


class Cluster:
    """The API server of a kubeconfig's context.

    Args:
        context: name of the context; None: the kubeconfig's current one, or the pod's own account inside a cluster.
        connect_s: longest wait for a connection, in seconds.
        read_s: longest wait for an answer, in seconds.

    Raises:
        SubmitError: the client is not installed, or no cluster is configured.
    """

    def __init__(self, context: str | None, *, connect_s: float = CONNECT_S, read_s: float = READ_S) -> None:
        try:
            from kubernetes import client
        except ImportError:
            raise SubmitError(
                "Kubernetes' Python client is not installed; run `pip install 'nemo-rl-like[kubernetes]'`"
            ) from None
        configuration = _configuration(context)
        configuration.retries = False
        self.host: str = configuration.host
        self._timeout = (connect_s, read_s)
        self._api = client.ApiClient(configuration)
        self._core = client.CoreV1Api(self._api)
        self._custom = client.CustomObjectsApi(self._api)

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        """Create an object; unknown fields are refused. With `dry_run` the server checks it and keeps nothing."""
        kind, namespace = BY_KIND[manifest["kind"]], manifest["metadata"]["namespace"]
        options: dict[str, Any] = {"field_validation": "Strict", **({"dry_run": "All"} if dry_run else {})}
        with self._words(f"create {kind.kind} {manifest['metadata']['name']!r} in namespace {namespace!r}"):
            if kind.group:
                call = self._custom.create_namespaced_custom_object
                return self._json(
                    call(kind.group, kind.version, namespace, kind.plural, manifest, **options, **self._raw)
                )
            return self._json(self._creators[kind.kind](namespace, manifest, **options, **self._raw))

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """An object with a group. Raises Missing where it is not there."""
        with self._words(f"read {kind.kind} {name!r} in namespace {namespace!r}"):
            call = self._custom.get_namespaced_custom_object
            return self._json(call(kind.group, kind.version, namespace, kind.plural, name, **self._raw))

    def own(self, manifest: Manifest, owner: Manifest) -> None:
        """Let the garbage collector delete `manifest` when `owner` is gone."""
        kind, meta = BY_KIND[manifest["kind"]], manifest["metadata"]
        reference = {
            "apiVersion": owner["apiVersion"],
            "kind": owner["kind"],
            "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"],
        }
        body = {"metadata": {"ownerReferences": [reference]}}
        options: dict[str, Any] = {"_content_type": "application/merge-patch+json", **self._raw}
        with self._words(f"change {kind.kind} {meta['name']!r} in namespace {meta['namespace']!r}"):
            if kind.group:
                call = self._custom.patch_namespaced_custom_object
                call(kind.group, kind.version, meta["namespace"], kind.plural, meta["name"], body, **options)
            else:
                self._patchers[kind.kind](meta["name"], meta["namespace"], body, **options)

    def delete(self, kind: Kind, namespace: str, name: str) -> None:
        """Delete an object after all that it owns; no error where it is gone."""
        options: dict[str, Any] = {"propagation_policy": "Foreground", **self._raw}
        with contextlib.suppress(Missing), self._words(f"delete {kind.kind} {name!r} in namespace {namespace!r}"):
            if kind.group:
                call = self._custom.delete_namespaced_custom_object
                call(kind.group, kind.version, namespace, kind.plural, name, **options)
            else:
                self._deleters[kind.kind](name, namespace, **options)

    def pods(self, namespace: str, selector: str) -> tuple[list[Manifest], str]:
        """Pods with these labels, and the resource version of the list."""
        with self._words(f"list pods in namespace {namespace!r}"):
            listed = self._json(self._core.list_namespaced_pod(namespace, label_selector=selector, **self._raw))
        return listed["items"], listed["metadata"]["resourceVersion"]

    def watch_pods(self, namespace: str, selector: str, version: str, seconds: int) -> Iterator[Manifest]:
        """Pods as they change after a resource version, for some seconds at most. Raises Gone where the version is too old."""
        with self._words(f"watch pods in namespace {namespace!r}"):
            answer: Any = self._core.list_namespaced_pod(
                namespace,
                label_selector=selector,
                resource_version=version,
                watch=True,
                timeout_seconds=seconds,
                _preload_content=False,
                _request_timeout=(self._timeout[0], seconds + self._timeout[1]),
            )
            self._check(answer)
            with contextlib.closing(answer):
                for line in _lines(answer):
                    event = json.loads(line)
                    if event["type"] == "ERROR" and event["object"].get("code") == HTTPStatus.GONE:
                        raise Gone
                    yield event["object"]

    def log(self, namespace: str, pod: str, *, follow: bool) -> Iterator[str]:
        """Lines of a pod's only container, each after its time (RFC 3339) and a blank; with `follow` until the container ends."""
        with self._words(f"read the log of pod {pod!r} in namespace {namespace!r}"):
            answer: Any = self._core.read_namespaced_pod_log(
                pod,
                namespace,
                follow=follow,
                timestamps=True,
                _preload_content=False,
                _request_timeout=(self._timeout[0], LOG_SILENCE_S if follow else self._timeout[1]),
            )
            self._check(answer)
            with contextlib.closing(answer):
                yield from _lines(answer)

    @property
    def _raw(self) -> dict[str, Any]:
        """Answers as they come, not as the client's models: those refuse fields of other versions."""
        return {"_preload_content": False, "_request_timeout": self._timeout}

    @property
    def _creators(self) -> dict[str, Callable[..., Any]]:
        core = self._core
        return {
            "ConfigMap": core.create_namespaced_config_map,
            "Service": core.create_namespaced_service,
            "Secret": core.create_namespaced_secret,
        }

    @property
    def _patchers(self) -> dict[str, Callable[..., Any]]:
        core = self._core
        return {
            "ConfigMap": core.patch_namespaced_config_map,
            "Service": core.patch_namespaced_service,
            "Secret": core.patch_namespaced_secret,
        }

    @property
    def _deleters(self) -> dict[str, Callable[..., Any]]:
        core = self._core
        return {
            "ConfigMap": core.delete_namespaced_config_map,
            "Service": core.delete_namespaced_service,
            "Secret": core.delete_namespaced_secret,
        }

    def _json(self, answer: Any) -> Manifest:
        self._check(answer)
        return json.loads(answer.data)

    @staticmethod
    def _check(answer: Any) -> None:
        if not 200 <= answer.status < 300:
            from kubernetes.client.exceptions import ApiException

            answer.read()
            raise ApiException(http_resp=answer)

    @contextlib.contextmanager
    def _words(self, what: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise _refusal(error, what, self.host) from None
        except HTTPError as error:
            raise SubmitError(
                f"cannot {what}: the API server {self.host} does not answer within {self._timeout[0]:g} s to connect and {self._timeout[1]:g} s to "
                f"read ({error}); check the network and `launch.kubernetes.context`"
            ) from None


def _configuration(context: str | None) -> k8s.Configuration:
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        if context is None and "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        else:
            file = os.environ.get("KUBECONFIG")  # the client reads it once, when it is imported
            config.load_kube_config(config_file=file, context=context, client_configuration=configuration)
    except config.ConfigException as error:
        named = "" if context is None else f" (`launch.kubernetes.context` is {context!r})"
        raise SubmitError(
            f"no Kubernetes cluster is configured{named}: {error}; name its kubeconfig in KUBECONFIG, and one of its contexts in `launch.kubernetes.context`"
        ) from None
    return configuration


def _lines(answer: Any) -> Iterator[str]:
    rest = b""
    for part in answer.stream(1 << 16, decode_content=False):
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line.decode("utf-8", "replace")
    if rest:
        yield rest.decode("utf-8", "replace")


def _refusal(error: Any, what: str, host: str) -> Exception:
    """What an answer of the API server means, and what to do."""
    said = _message(error)
    match error.status:
        case HTTPStatus.GONE:
            return Gone()
        case HTTPStatus.UNAUTHORIZED:
            return SubmitError(
                f"cannot {what}: {host} does not know you ({said}); your token or certificate has expired or is another cluster's: log in again, "
                "then try `kubectl auth whoami`"
            )
        case HTTPStatus.FORBIDDEN:
            return SubmitError(
                f"cannot {what}: you may not ({said}); ask for the role in k8s/, or use another `launch.kubernetes.namespace`"
            )
        case HTTPStatus.NOT_FOUND:
            return Missing(
                f"cannot {what}: {said}; the namespace, the job or the kind is not there (RayJob needs KubeRay, JobSet its controller, PodGroup Volcano)"
            )
        case HTTPStatus.CONFLICT:
            return SubmitError(
                f"cannot {what}: {said}; end that one first (`nrl cancel`), or give this job another name"
            )
        case HTTPStatus.BAD_REQUEST | HTTPStatus.UNPROCESSABLE_ENTITY:
            return SubmitError(f"cannot {what}: the cluster does not take it: {said}")
        case HTTPStatus.TOO_MANY_REQUESTS:
            return SubmitError(f"cannot {what}: the API server is overloaded ({said}); try again")
        case _:
            return SubmitError(f"cannot {what}: the API server {host} answered {error.status}: {said}")


def _message(error: Any) -> str:
    body = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else error.body
    try:
        return str(json.loads(body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
