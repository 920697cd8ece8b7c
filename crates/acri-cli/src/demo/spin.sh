# One process of the runaway: it ignores what it is told, writes its pid, and
# with an argument begets another like it.
trap '' TERM INT HUP
echo > "pids/$$"
[ -z "${1:-}" ] || sh spin.sh &
while :; do sleep 1; done
