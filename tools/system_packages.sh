#!/usr/bin/env bash
# Checks what setting up and testing need from the system. Installs what is missing through apt-get when run as
# root on Debian or Ubuntu; otherwise says what to install. Usage: system_packages.sh PYTHON
set -euo pipefail

python=${1:-}
say() { printf '\033[1mforebay:\033[0m %s\n' "$*" >&2; }

[ -n "$python" ] || { say "no python3 found; as root: apt-get install python3 python3-venv python3-dev"; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$python is $("$python" --version 2>&1), forebay needs 3.11 or later; run \`make PYTHON=/path/to/python3.11\`"
    exit 1
}

required=() # setting up fails without these
wanted=()   # only some tests need these; they skip
version=$("$python" -c 'import sys; print(f"{sys.version_info.major}.{sys.version_info.minor}")')
"$python" -c 'import ensurepip, venv' 2>/dev/null || required+=("python$version-venv")
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    required+=("python$version-dev")
command -v gcc >/dev/null || required+=(gcc libc6-dev)
command -v fio >/dev/null || wanted+=(fio)
command -v qemu-storage-daemon >/dev/null || wanted+=(qemu-system-common)
if grep -q bookworm /etc/os-release 2>/dev/null; then # elsewhere it has another version, which the tests do not know
    "$python" -c 'import ctypes; ctypes.CDLL("librte_vhost.so.23")' 2>/dev/null || wanted+=(librte-vhost23)
fi

missing=("${required[@]}" "${wanted[@]}")
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
    say "installing system packages: ${missing[*]}"
    log=$(mktemp)
    if apt-get update >"$log" 2>&1 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}" >>"$log" 2>&1 </dev/null; then
        rm -f "$log"
        exit 0
    fi
    tail -n 5 "$log" >&2
    say "apt-get failed; its output is in $log"
fi
[ ${#wanted[@]} -eq 0 ] || say "tests that need ${wanted[*]} will skip; as root: apt-get install ${wanted[*]}"
[ ${#required[@]} -eq 0 ] || { say "missing ${required[*]}; as root: apt-get install ${required[*]}"; exit 1; }
