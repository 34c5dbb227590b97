#!/bin/bash
# Trains on a slice of spot TPUs from Google Cloud's queue, and asks for another slice when this one
# is taken away:
#
#     ZONE=us-east5-a TYPE=v6e-16 VERSION=v2-alpha-tpuv6e SETUP='sudo mount ... && ...' \
#         launch/tpu_queued_resource.sh ID NAME --run_dir /runs/NAME --mesh.data 16
#
# SETUP runs on every host of a new slice. It puts the package into FOLDER and mounts the disk of the
# run directory, which must outlive the slice. After three failures on one slice the script ends.
set -euo pipefail

id=${1:?name the queued resource} config=${2:?name a config}
shift 2
: "${ZONE:?name a zone}" "${TYPE:?name a type of slice, such as v6e-16}"
: "${VERSION:?name the version of the software on the hosts, such as v2-alpha-tpuv6e}"
: "${SETUP:?give the command that prepares a host}"
seconds=${POLL_SECONDS:-30}
said=$(mktemp)
trap 'rm -f "$said"' EXIT

queue() { gcloud compute tpus queued-resources "$@" --zone "$ZONE"; }
everywhere() { gcloud compute tpus tpu-vm ssh "$id" --zone "$ZONE" --worker all --command "$1"; }

train=$(printf '%q ' "${PYTHON:-python3}" train.py "$config" --distributed.detect True "$@")
ready=no failures=0
while true; do
    if ! state=$(queue describe "$id" --format 'value(state.state)' 2>"$said"); then
        grep -q NOT_FOUND "$said" && state=none || state=unknown
    fi
    case $state in
    none)
        echo "$id: asks for $TYPE in $ZONE"
        queue create "$id" --node-id "$id" --accelerator-type "$TYPE" \
            --runtime-version "$VERSION" --spot
        ready=no failures=0
        ;;
    SUSPENDED | FAILED)
        echo "$id: $state; asks again"
        queue delete "$id" --force --quiet
        ;;
    ACTIVE)
        if [ "$ready" = no ] && everywhere "$SETUP"; then ready=yes; fi
        if [ "$ready" = yes ] && everywhere "cd ${FOLDER:-fwpkm_jax} && exec $train"; then
            echo "$id: finished; to give the slice back:" \
                "gcloud compute tpus queued-resources delete $id --force --zone $ZONE"
            exit 0
        fi
        failures=$((failures + 1))
        if [ "$failures" -eq 3 ]; then
            echo "$id: three failures on one slice; their messages are above" >&2
            exit 1
        fi
        sleep "$seconds"  # Until the queue knows whether the slice is gone.
        ;;
    *)
        echo "$id: $state $(cat "$said")"
        sleep "$seconds"
        ;;
    esac
done
