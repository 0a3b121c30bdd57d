"""A double of Kubernetes' API server: what the official client and kubectl ask for, objects checked strictly by their schemas.

REST with discovery, resource versions, watches that grow too old (410), dry runs, merge patches, logs, foreground deletion with garbage collection, and the
refusals 401, 403, 404, 409, 422. Controllers and the kubelet act on it (`controllers.py`). It knows no RBAC, quotas, defaults or admission.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ipaddress
import json
import re
import ssl
import threading
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from nemo_rl_like.launch.kubernetes.api import KINDS, Kind
from tests.launch.kubernetes.controllers import (
    JobController,
    JobSetController,
    Kubelet,
    Manifest,
    Outcome,
    RayController,
    Script,
    now,
    owned,
)
from tests.launch.kubernetes.schemas import Unfit, check

TOKEN = "sesame"
CERTIFICATE = "server.pem"
FORBIDDEN = "forbidden"
"""A namespace where nothing may be done."""
ALL = {k.plural: k for k in (*KINDS, Kind("", "v1", "pods", "Pod"))}
NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.body = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "reason": reason,
            "code": code,
        }
        self.body["message"], self.code = message, code


class ApiServer:
    """One cluster with its controllers; runs in a thread of its own.

    Args:
        script: what the pods of a completion index do, one outcome for each start.
    """

    def __init__(self, script: dict[int, list[Outcome]] | None = None) -> None:
        self.objects: dict[tuple[str, str, str], Manifest] = {}
        self.events: list[tuple[int, str, str, Manifest]] = []
        self.logs: dict[str, list[str]] = {}
        self.version, self.oldest = 100, 0
        self.break_logs_after: int | None = None
        self.watches = 0
        self.asked: set[tuple[str, str, str]] = set()
        """Group, resource and verb of every request, as a role names them."""
        steps = Script(script or {})
        self.kubelet = Kubelet(self)
        self.jobs, self.jobsets = JobController(self, self.kubelet, steps), JobSetController(self)
        self.rays = RayController(self, self.kubelet, steps)
        self.tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    # What controllers use.

    def of(self, plural: str, namespace: str) -> list[Manifest]:
        return [o for (p, n, _), o in self.objects.items() if (p, n) == (plural, namespace)]

    def put(self, plural: str, thing: Manifest) -> Manifest:
        """Keep a new object, as the server completes it."""
        meta = thing["metadata"]
        meta.update(
            uid=str(uuid.uuid4()), creationTimestamp=now()[:19] + "Z", generation=1
        )  # whole seconds, as the API has
        thing["status"] = {}
        self.objects[plural, meta["namespace"], meta["name"]] = thing
        self._changed("ADDED", plural, thing)
        return thing

    def set_status(self, plural: str, namespace: str, name: str, status: Manifest) -> None:
        thing = self.objects.get((plural, namespace, name))
        if thing is not None:
            thing["status"] = status
            self._changed("MODIFIED", plural, thing)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Delete an object and, as the garbage collector does, all that it owns."""
        thing = self.objects.pop((plural, namespace, name), None)
        if thing is None:
            return
        if plural == "pods":
            self.kubelet.tell(thing)
        self._changed("DELETED", plural, thing)
        for (p, n, m), other in list(self.objects.items()):
            if owned(other, thing):
                self.remove(p, n, m)

    def log_line(self, pod: str, text: str) -> None:
        self.logs.setdefault(pod, []).append(f"{now()} {text}")

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def compact(self) -> None:
        """Forget history, as etcd does after minutes: watches from an older version are refused."""
        self.oldest = self.version + 1
        self.version += 1

    def _changed(self, what: str, plural: str, thing: Manifest) -> None:
        self.version += 1
        thing["metadata"]["resourceVersion"] = str(self.version)
        self.events.append((self.version, what, plural, copy.deepcopy(thing)))
        asyncio.get_running_loop().call_soon(self._sync)

    def _sync(self) -> None:
        for (plural, _, _), thing in list(self.objects.items()):
            if plural == "jobs":
                self.jobs.sync(thing)
            elif plural == "jobsets":
                self.jobsets.sync(thing)
            elif plural == "rayjobs":
                self.rays.sync(thing)

    # REST.

    def app(self) -> web.Application:
        app = web.Application(client_max_size=8 << 20, middlewares=[self._guard])
        version = {"major": "1", "minor": "33", "gitVersion": "v1.33.0", "gitCommit": "", "gitTreeState": "", "buildDate": "", "goVersion": "", "compiler": "", "platform": "linux/amd64"}  # fmt: skip
        app.router.add_get("/version", _answer(version))
        app.router.add_get(
            "/api", _answer({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})
        )
        groups = {(k.group, k.version) for k in ALL.values()}
        app.router.add_get("/apis", _answer(_group_list({g for g in groups if g[0]})))
        for group, release in groups:
            base = f"/apis/{group}/{release}" if group else f"/api/{release}"
            app.router.add_get(base, _answer(_resource_list(group, release)))
            mine = "|".join(k.plural for k in ALL.values() if (k.group, k.version) == (group, release))
            path = f"{base}/namespaces/{{namespace}}/{{plural:{mine}}}"
            app.router.add_get(path, self._list)
            app.router.add_post(path, self._create)
            app.router.add_get(path + "/{name}", self._get)
            app.router.add_patch(path + "/{name}", self._patch)
            app.router.add_delete(path + "/{name}", self._delete)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}/log", self._log)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        try:
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            self._note(request)
            if request.match_info.get("namespace") == FORBIDDEN:
                raise Refused(403, "Forbidden", f'User "tester" cannot do that in the namespace "{FORBIDDEN}"')
            return await handler(request)  # type: ignore[no-any-return]
        except Refused as refusal:
            return web.json_response(refusal.body, status=refusal.code)
        except web.HTTPNotFound:
            body = Refused(404, "NotFound", "the server could not find the requested resource").body
            return web.json_response(body, status=404)

    def _note(self, request: web.Request) -> None:
        at = request.match_info
        if "namespace" not in at:
            return
        log = "plural" not in at
        verb = {"POST": "create", "PATCH": "patch", "DELETE": "delete"}.get(
            request.method, "get" if "name" in at else "list"
        )
        if verb == "list" and "watch" in request.query:
            verb = "watch"
        self.asked.add(("", "pods/log", "get") if log else (ALL[at["plural"]].group, at["plural"], verb))

    async def _create(self, request: web.Request) -> web.Response:
        thing, kind = await request.json(), ALL[request.match_info["plural"]]
        meta, namespace = thing["metadata"], request.match_info["namespace"]
        if (thing.get("apiVersion"), thing.get("kind")) != (kind.api_version, kind.kind):
            raise Refused(
                400,
                "BadRequest",
                f"{thing.get('kind')} in version {thing.get('apiVersion')} cannot be handled as a {kind.kind}",
            )
        if meta.setdefault("namespace", namespace) != namespace:
            raise Refused(400, "BadRequest", "the namespace of the object does not match the request")
        if not re.fullmatch(NAME, meta["name"]):
            raise Refused(422, "Invalid", f'{kind.kind} "{meta["name"]}" is invalid: metadata.name: Invalid value')
        try:
            check(thing)
        except Unfit as error:
            raise Refused(
                400,
                "BadRequest",
                f"{kind.kind} in version {kind.version!r} cannot be handled: strict decoding error: {error}",
            ) from None
        if (kind.plural, namespace, meta["name"]) in self.objects:
            raise Refused(409, "AlreadyExists", f'{kind.plural} "{meta["name"]}" already exists')
        if request.query.get("dryRun") == "All":
            return web.json_response(thing, status=201)
        return web.json_response(self.put(kind.plural, thing), status=201)

    def _found(self, request: web.Request) -> Manifest:
        at = request.match_info
        plural = at.get("plural", "pods")
        thing = self.objects.get((plural, at["namespace"], at["name"]))
        if thing is None:
            raise Refused(404, "NotFound", f'{plural} "{at["name"]}" not found')
        return thing

    async def _get(self, request: web.Request) -> web.Response:
        return web.json_response(self._found(request))

    async def _patch(self, request: web.Request) -> web.Response:
        thing = self._found(request)
        if request.content_type not in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
            raise Refused(415, "UnsupportedMediaType", request.content_type)
        _merge(thing, await request.json())
        self._changed("MODIFIED", request.match_info["plural"], thing)
        return web.json_response(thing)

    async def _delete(self, request: web.Request) -> web.Response:
        """Foreground: the object stays, marked, until its pods have ended."""
        thing, at = self._found(request), request.match_info
        body = await request.json() if request.can_read_body else {}
        policy = request.query.get("propagationPolicy") or (body or {}).get("propagationPolicy")
        if policy == "Foreground" and [p for p in self.of("pods", at["namespace"]) if owned(p, thing)]:
            thing["metadata"]["deletionTimestamp"] = now()
            self._changed("MODIFIED", at["plural"], thing)
            self.spawn(self._when_pods_ended(thing, at["plural"]))
            return web.json_response(thing)
        self.remove(at["plural"], at["namespace"], at["name"])
        return web.json_response({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"})

    async def _when_pods_ended(self, thing: Manifest, plural: str) -> None:
        meta = thing["metadata"]
        pods = [p for p in self.of("pods", meta["namespace"]) if owned(p, thing)]
        for pod in pods:
            self.kubelet.tell(pod)
        while [p for p in pods if p["status"].get("phase") == "Running"]:
            await asyncio.sleep(0.01)
        self.remove(plural, meta["namespace"], meta["name"])

    async def _list(self, request: web.Request) -> web.StreamResponse:
        kind, namespace = ALL[request.match_info["plural"]], request.match_info["namespace"]
        wanted = dict(pair.split("=", 1) for pair in request.query.get("labelSelector", "").split(",") if pair)
        fields = dict(pair.split("=", 1) for pair in request.query.get("fieldSelector", "").split(",") if pair)
        name = fields.get("metadata.name")

        def fits(thing: Manifest) -> bool:
            meta = thing["metadata"]
            return (
                meta["namespace"] == namespace
                and name in (None, meta["name"])
                and wanted.items() <= meta.get("labels", {}).items()
            )

        if request.query.get("watch", "").lower() in ("true", "1"):
            return await self._watch(request, kind.plural, fits)
        items = [o for o in self.of(kind.plural, namespace) if fits(o)]
        meta = {"resourceVersion": str(self.version)}
        return web.json_response(
            {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": meta, "items": items}
        )

    async def _watch(self, request: web.Request, plural: str, fits: Any) -> web.StreamResponse:
        self.watches += 1
        since = int(request.query.get("resourceVersion") or self.version)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self.oldest:
            gone = Refused(410, "Expired", f"too old resource version: {since} ({self.oldest})").body
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        loop = asyncio.get_running_loop()
        end = loop.time() + float(request.query.get("timeoutSeconds", 60))
        while loop.time() < end:
            for version, what, kind, thing in [e for e in self.events if e[0] > since]:
                since = version
                if kind == plural and fits(thing):
                    await response.write(json.dumps({"type": what, "object": thing}).encode() + b"\n")
            await asyncio.sleep(0.01)
        return response

    async def _log(self, request: web.Request) -> web.StreamResponse:
        pod, name = self._found(request), request.match_info["name"]
        stamps = request.query.get("timestamps", "").lower() == "true"
        follow = request.query.get("follow", "").lower() == "true"
        if pod["status"].get("phase") in (None, "Pending"):
            raise Refused(400, "BadRequest", f'container in pod "{name}" is waiting to start: ContainerCreating')
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        await response.prepare(request)
        sent = 0
        while True:
            over = not follow or pod["status"].get("phase") in ("Succeeded", "Failed")
            for line in self.logs.get(name, [])[sent:]:
                if self.break_logs_after == sent:
                    self.break_logs_after = None
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await response.write((line if stamps else line.partition(" ")[2]).encode() + b"\n")
                sent += 1
            if over:
                return response
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def serving(server: ApiServer, folder: Path) -> Iterator[Path]:
    """The server on a port of this machine while the block runs; yields its kubeconfig."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(_certificate(folder))

    async def start() -> web.AppRunner:
        runner = web.AppRunner(server.app(), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        server.port = runner.addresses[0][1]
        ready.set()
        return runner

    async def stop(runner: web.AppRunner) -> None:
        for task in list(server.tasks):
            task.cancel()
        await runner.cleanup()

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(stop(runner))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield write_kubeconfig(folder, f"https://127.0.0.1:{server.port}")
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def write_kubeconfig(folder: Path, server: str, token: str = TOKEN) -> Path:
    """A kubeconfig with one context, `tests`."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "tests",
        "clusters": [
            {"name": "double", "cluster": {"server": server, "certificate-authority": str(folder / CERTIFICATE)}}
        ],
        "users": [{"name": "tester", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "double", "user": "tester"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def _certificate(folder: Path) -> Path:
    """A key and a certificate of its own for 127.0.0.1, in one file: kubectl sends no token without TLS."""
    path = folder / CERTIFICATE
    if path.exists():
        return path
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "double")])
    today = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = (
        builder.serial_number(1).not_valid_before(today - timedelta(days=1)).not_valid_after(today + timedelta(days=1))
    )
    builder = builder.add_extension(address, critical=False).add_extension(
        x509.BasicConstraints(True, None), critical=True
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(secret + builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


def _answer(body: Manifest) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(body)

    return handler


def _group_list(groups: set[tuple[str, str]]) -> Manifest:
    listed = []
    for group, release in sorted(groups):
        version = {"groupVersion": f"{group}/{release}", "version": release}
        listed.append({"name": group, "versions": [version], "preferredVersion": version})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}


def _resource_list(group: str, release: str) -> Manifest:
    verbs = ["create", "delete", "get", "list", "patch", "watch"]
    resources = [
        {"name": k.plural, "singularName": k.kind.lower(), "namespaced": True, "kind": k.kind, "verbs": verbs}
        for k in ALL.values()
        if (k.group, k.version) == (group, release)
    ]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{release}".lstrip("/"),
        "resources": resources,
    }


def _merge(into: Manifest, patch: Manifest) -> None:
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
