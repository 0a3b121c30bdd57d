#!/usr/bin/env bash
# Makes a squashfs file of an image, once, on the shared filesystem: jobs then start without a registry (`launch.image: /shared/nrl.sqsh`).
#   enroot-import.sh REGISTRY/NAME:TAG FILE.sqsh
# enroot's address of an image has a tag and no digest, so FILE.sqsh.sha256 holds what the file was: `sha256sum --check` before a job.
# Credentials of a registry stand in ~/.config/enroot/.credentials, never in words of a command.
set -euo pipefail

if [[ $# -ne 2 || ! "$1" =~ ^([^/#@]+)/([^:#@]+):([A-Za-z0-9_][A-Za-z0-9_.-]*)$ ]]; then
    sed -n '2,5s/^# \?//p' "$0" >&2
    exit 2
fi
registry="${BASH_REMATCH[1]}" image="${BASH_REMATCH[2]}" tag="${BASH_REMATCH[3]}" file="$2"
command -v enroot >/dev/null || { echo "enroot is not installed here; run this where it is, for example in a job" >&2; exit 1; }
[[ ! -e "$file" ]] || { echo "$file is there already; remove it, or name another" >&2; exit 1; }

# Only a whole file gets the name that jobs read.
part="$(dirname "$file")/.$(basename "$file").$$.sqsh"
trap 'rm -f "$part"' EXIT
enroot import --output "$part" "docker://${registry}#${image}:${tag}"
chmod 0644 "$part"
mv --no-clobber "$part" "$file"
(cd "$(dirname "$file")" && sha256sum "$(basename "$file")" >"$(basename "$file").sha256")
