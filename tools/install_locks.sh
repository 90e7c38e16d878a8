#!/usr/bin/env bash
# Installs lock files exactly as written, shows how far it is, then checks that PyTorch loads.
# Usage: install_locks.sh PYTHON LOCK...
set -euo pipefail

python=$1
shift
say() { printf '\033[1mforebay:\033[0m %s\n' "$*" >&2; }
options=()
for lock in "$@"; do options+=(-r "$lock"); done
total=$(cat "$@" | grep -c '==')

say "installing $total pinned packages (several hundred MB to download the first time)"
log=$(mktemp)
tty=$([ -t 2 ] && echo 1 || echo 0)
"$python" -m pip install --no-deps --no-compile --progress-bar off "${options[@]}" 2>&1 </dev/null | tee "$log" | awk -v total="$total" -v tty="$tty" '
    /^Collecting / { n++; if (tty) printf "\r\033[K  %d/%d %s", n, total, $2 > "/dev/stderr" }
    /^Installing collected/ { if (tty) printf "\r\033[K  unpacking" > "/dev/stderr" }
    END { if (tty) printf "\r\033[K" > "/dev/stderr" }' || {
    { grep -E '^ERROR' "$log" || tail -n 3 "$log"; } | tail -n 3 | cut -c 1-300 >&2
    say "pip failed; its output is in $log"
    exit 1
}
rm -f "$log"

"$python" -c 'import torch' 2>/dev/null || {
    say "PyTorch does not load: pip found its CUDA build, whose libraries are not in the locks"
    say "point pip at PyTorch's CPU index (PIP_EXTRA_INDEX_URL; the address is on PyTorch's installation page), then \`make clean setup\`"
    exit 1
}

"$python" tools/alias_vllm.py
