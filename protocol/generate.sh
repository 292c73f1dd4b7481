#!/usr/bin/env bash
# Generates the Python modules beside the .proto files, with the pinned grpcio-tools (the oldest that we support).
# With an argument, generates into that folder instead: the test that compares does so.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
output=${1:-protocol}
"$python" - <<'PY'
import importlib.metadata, sys
found = importlib.metadata.version("grpcio-tools")
if found != "1.74.0":
    sys.exit(f"grpcio-tools 1.74.0 is needed to generate the protocol, found {found}: make generate uses the right one")
PY
"$python" -m grpc_tools.protoc --proto_path=protocol --python_out="$output" --pyi_out="$output" --grpc_python_out="$output" \
    protocol/atoll/protocol/v1/*.proto
