#!/usr/bin/env bash
# Install the clients of tests/clients into an environment of their own ($2), so that what they pin changes nothing for
# kvasir. Torch and transformers, which lm-eval needs, come from the development environment (PYTHON, $1).
set -euo pipefail
python=$1 home=$2
cd "$(dirname "$0")/.."

"$python" -m venv "$home"
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
  >"$("$home/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
"$home/bin/python" -m pip --disable-pip-version-check install -q -r tests/clients/requirements.txt
if command -v npm >/dev/null 2>&1; then
  cp tests/clients/package.json "$home/"
  (cd "$home" && npm install --no-audit --no-fund --silent)
else
  echo "npm is not installed, so the checks of OpenAI's JavaScript client will be skipped." >&2
fi
