#!/usr/bin/env bash
# The steps that make an image; Dockerfiles run one in each layer, and tests run the same ones in a plain folder.
#   install.sh pinned IMAGE                             the base has a digest
#   install.sh environment FOLDER UV_LOCK [OPTION...]   a Python environment, and the installer beside it
#   install.sh wheels FOLDER LOCK [OPTION...]           every dependency, as the lock names it
#   install.sh source FOLDER SOURCE                     this project, built from its source
#   install.sh user ID                                  who runs it, and their home
set -euo pipefail

pinned() {
    [[ "$1" =~ @sha256:[0-9a-f]{64}$ ]] && return
    echo "BASE_IMAGE is '$1', which can change under its name; give it by digest (NAME@sha256:...)" >&2
    exit 2
}

environment() {
    local folder="$1" lock="$2"
    shift 2
    "${PYTHON:-python3}" -m venv "$@" "$folder"
    "${PYTHON:-python3}" -m venv "$folder.build"
    "$folder.build/bin/python" -m pip install --quiet --no-cache-dir --no-deps --requirement "$lock"
}

wheels() {
    local folder="$1" lock="$2"
    shift 2
    "$folder.build/bin/uv" pip install --quiet --python "$folder/bin/python" --no-deps --requirement "$lock" "$@"
}

source_() {
    local folder="$1" source="$2" built
    built="$(mktemp -d)"
    "$folder.build/bin/uv" build --quiet --wheel --out-dir "$built" "$source"
    "$folder.build/bin/uv" pip install --quiet --python "$folder/bin/python" --no-deps "$built"/*.whl
    rm -r "$built"
}

user() {
    getent passwd "$1" >/dev/null || useradd --uid "$1" --user-group --home-dir /home/nrl --shell /usr/sbin/nologin nrl
    install --directory --owner="$1" --group="$1" --mode=0755 /home/nrl
}

case "${1:-}" in
    pinned | environment | wheels | user) "$@" ;;
    source) shift && source_ "$@" ;;
    *)
        sed -n '2,8s/^# \?//p' "$0" >&2
        exit 2
        ;;
esac
