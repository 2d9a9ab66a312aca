#!/bin/sh
# Checks what this directory and ../dashboards ship with the tools that read them; says what it
# skipped because a tool is missing. Exit code: 0 nothing wrong, 1 something is.
set -u
here=$(cd "$(dirname "$0")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
status=0

# check NAME TOOL COMMAND...: runs the command if the tool is there.
check() {
    name=$1 tool=$2
    shift 2
    if ! command -v "$tool" >/dev/null 2>&1; then
        echo "skipped: $name ($tool is not installed)"
    elif "$@" >"$scratch/output" 2>&1; then
        echo "ok: $name"
    else
        echo "FAILED: $name"
        cat "$scratch/output"
        status=1
    fi
}

# The real binary need not be installed: /bin/true stands in for it. A warning about our unit is a
# failure (an unknown key is only warned about); those about other units of the host are not ours.
verify_unit() {
    sed 's|^ExecStart=/usr/local/bin/ftactor|ExecStart=/bin/true|' \
        "$here/ftactor-solo.service" >"$scratch/ftactor-solo.service"
    systemd-analyze verify "$scratch/ftactor-solo.service" >"$scratch/said" 2>&1
    verdict=$?
    cat "$scratch/said"
    [ $verdict -eq 0 ] && ! grep -q ftactor-solo "$scratch/said"
}

check "ftactor-solo.service" systemd-analyze verify_unit
check "prometheus.yml" promtool promtool check config "$here/prometheus.yml"
check "dashboards/run.json" jq jq -e '.uid and (.panels | length > 0)' "$here/../dashboards/run.json"
exit $status
