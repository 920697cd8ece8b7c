#!/bin/sh
# A runaway: five processes that ignore SIGTERM, most of them in sessions of
# their own, so that neither a signal to the program nor one to its process
# group would end them all. Each writes its pid.
trap '' TERM INT HUP
mkdir -p pids
new_session() { if command -v setsid > /dev/null; then setsid "$@"; else "$@"; fi; }
new_session sh spin.sh &
new_session sh spin.sh &
new_session sh spin.sh again &
echo > "pids/$$"
while [ "$(ls pids | wc -l)" -lt 5 ]; do sleep 0.05; done
echo "running away with $(ls pids | wc -l) processes"
while :; do sleep 1; done
