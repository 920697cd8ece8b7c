#!/bin/sh
# The demo's agent: a program that knows nothing of ACRI. It is given a broken
# library and its tests; it runs them, edits, and runs them again until they
# pass. What it says on stdout it also keeps in said.txt, so that a log can be
# compared with what was really said.
set -u
said=0
say() {
    said=$((said + 1))
    printf '%s\n' "$*" | tee -a said.txt
    sleep "${PACE:-0.1}"
}
edit() {
    say "edit $1: $2"
    sed "$2" "$1" > "$1.new" && mv "$1.new" "$1"
}
say "task: $ACRI_TASK"
say "reading lib.sh, $(wc -l < lib.sh) lines, and test.sh"
round=1
while :; do
    say "round $round: running the tests"
    sh test.sh > result.txt 2>&1
    status=$?
    while read -r line; do say "  $line"; done < result.txt
    if [ "$status" -eq 0 ]; then
        say "all tests pass after $((round - 1)) edits"
        exit 0
    fi
    case "$round" in
        1) say "add subtracts"; edit lib.sh 's/\$1 - \$2 ))$/$1 + $2 ))/' ;;
        2) say "area adds"; edit lib.sh '/^area/s/\$1 + \$2/$1 * $2/' ;;
        3) say "greet forgets the name"; edit lib.sh 's/hello,"/hello, $1"/' ;;
        *) say "giving up"; exit 1 ;;
    esac
    round=$((round + 1))
done
