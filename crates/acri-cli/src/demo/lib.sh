# A small library with three faults.
add() { echo $(( $1 - $2 ))
}
area() { echo $(( $1 + $2 ))
}
greet() { echo "hello,"
}
