# Sourced by the other scripts of this folder. Finds a Python that can run scripts/setup.py, as $python,
# and names the parts of the set-up that need all, as $all_parts.

cd "$(dirname "$0")/.." || exit 1

for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
        break
    fi
    python=
done
if [ -z "$python" ]; then
    echo "No Python from 3.11 to 3.14 was found (looked for: ${PYTHON:-python3, python3.11 to python3.14})." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    exit 1
fi

# What the checks and the tests need. Both install all of it, because each further set-up takes a minute.
all_parts=coordinator,postgres,s3,train,envs,parquet,verifiers,p2p,vllm,dev
