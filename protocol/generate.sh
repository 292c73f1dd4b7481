#!/usr/bin/env bash
# Generates the Python modules beside the .proto files, with the pinned grpcio-tools (the oldest that we support).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
"$python" - <<'PY'
import importlib.metadata, sys
found = importlib.metadata.version("grpcio-tools")
if found != "1.74.0":
    sys.exit(f"grpcio-tools 1.74.0 is needed to generate the protocol, found {found}: pip install --group dev")
PY
"$python" -m grpc_tools.protoc --proto_path=protocol --python_out=protocol --pyi_out=protocol --grpc_python_out=protocol \
    protocol/atoll/protocol/v1/*.proto
