# The library's tests: status 0 if all pass.
. ./lib.sh
failed=0
check() {
    if [ "$2" = "$3" ]; then
        echo "ok   $1"
    else
        echo "FAIL $1: expected $3, got $2"
        failed=1
    fi
}
check "add 2 3" "$(add 2 3)" 5
check "area 4 5" "$(area 4 5)" 20
check "greet ada" "$(greet ada)" "hello, ada"
exit "$failed"
