#!/usr/bin/env bash
# Builds the virtual environment: finds a Python >= 3.12 and installs the pinned packages.
set -euo pipefail
venv=$1
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
        candidate=$(command -v "$candidate" 2>/dev/null) || continue
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    if command -v uv >/dev/null 2>&1; then
        uv python find '>=3.12' 2>/dev/null || true
    fi
}

if ! { [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python"; }; then
    python=$(find_python)
    if [ -z "$python" ]; then
        echo "Miles needs Python 3.12 or newer, and found none on PATH, in pyenv or in uv." >&2
        echo "Install one (apt install python3.12 python3.12-venv, pyenv install 3.12, or" >&2
        echo "uv python install 3.12) and run make again." >&2
        exit 1
    fi
    echo "Creating $venv with $python ($("$python" --version 2>&1))"
    "$python" -m venv "$venv" 2>/dev/null || {
        command -v uv >/dev/null 2>&1 || {
            echo "$python has no venv module: install python3-venv, or uv." >&2
            exit 1
        }
        uv venv --seed --python "$python" "$venv"
    }
fi

echo "Installing packages (torch alone is several GB; a few minutes)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt torch transformers
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint constraints.txt --editable '.[dev]'
