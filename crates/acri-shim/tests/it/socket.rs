use std::io::{Read as _, Write as _};

use acri_shim::client::Client;
use acri_shim::wire::{self, Body, Kill, Op, Release, Request, Stop, Watch};
use acri_shim::{ExitReason, Owner, Token};

use crate::support::{LIMIT, OWNER, Run};

fn quiet() -> Run {
    let run = Run::start("echo up; exec sleep 1000");
    run.until_says("up");
    run
}

/// True once the other side has closed.
fn closed(stream: &mut std::os::unix::net::UnixStream) -> bool {
    stream.set_read_timeout(Some(LIMIT)).expect("a time-out");
    matches!(stream.read(&mut [0; 64]), Ok(0)) || {
        let again = stream.read(&mut [0; 64]);
        matches!(again, Ok(0)) || again.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset)
    }
}

#[test]
fn stale_epochs_are_refused_and_told_the_highest() {
    let run = quiet();
    let mut client = run.client();
    let newer = Owner { epoch: 5, incarnation: [5; 16] };
    assert_eq!(client.call(Op::Claim(newer)).expect("an answer"), Body::Done);
    assert_eq!(client.call(Op::Claim(newer)).expect("an answer"), Body::Done, "a repeat is accepted");
    assert_eq!(run.scan().owner, Some(newer));
    let stale = [
        Op::Claim(OWNER),
        Op::Claim(Owner { epoch: 5, incarnation: [6; 16] }),
        Op::Contact(OWNER),
        Op::Stop(Stop { epoch: 3, ..Stop::default() }),
        Op::Kill(Kill { epoch: 4, ..Kill::default() }),
        Op::Release(Release { epoch: 3, ..Release::default() }),
    ];
    for op in stale {
        let answer = client.call(op.clone()).expect("an answer");
        assert!(matches!(answer, Body::Stale(stale) if stale.highest == 5), "{op:?}: {answer:?}");
    }
    assert_eq!(run.scan().kill, None);
    let Body::Status(status) = client.call(Op::Status).expect("an answer") else { panic!("no status") };
    assert_eq!(status.owner, newer);
    assert_eq!((status.stdout_bytes, status.spool_end), (3, 43));
    assert_eq!(status.meta, run.scan().meta.expect("meta"));
}

#[test]
fn a_wrong_token_closes_the_connection() {
    let run = quiet();
    assert!(Client::connect(run.dir(), &Token::from_bytes([0; 32]), LIMIT).is_err());
    let mut stream = wire::connect(run.dir()).expect("connect");
    stream.write_all(&wire::encode(&Request { id: 1, op: Op::Status })).expect("send");
    assert!(closed(&mut stream), "a request before the token was answered");
    run.client();
}

#[test]
fn garbage_and_oversize_messages_close_only_their_own_connection() {
    let run = quiet();
    let mut good = run.client();
    for bytes in [
        &b"\xff\xff\xff\xffxxxx"[..],
        b"\x04\0\0\0\xc1\xc1\xc1\xc1",
        b"\x05\0\0\0\x81\xa2id\x01",
        b"GET / HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = wire::connect(run.dir()).expect("connect");
        stream.write_all(bytes).expect("send");
        assert!(closed(&mut stream), "{bytes:?}");
    }
    assert!(matches!(good.call(Op::Status), Ok(Body::Status(_))));
}

#[test]
fn a_client_that_never_reads_is_dropped_and_delays_nobody() {
    let run = quiet();
    let mut deaf = wire::connect(run.dir()).expect("connect");
    let hello = wire::Hello { version: wire::VERSION, token: run.spawned.token.clone() };
    deaf.write_all(&wire::encode(&Request { id: 1, op: Op::Hello(hello) })).expect("send");
    let status = wire::encode(&Request { id: 2, op: Op::Status });
    deaf.set_write_timeout(Some(LIMIT)).expect("a time-out");
    let mut good = run.client();
    let mut dropped = false;
    for round in 0..200_000 {
        if deaf.write_all(&status).is_err() {
            dropped = true;
            break;
        }
        if round % 1000 == 0 {
            assert!(matches!(good.call(Op::Status), Ok(Body::Status(_))));
        }
    }
    assert!(dropped, "the shim keeps everything for a client that never reads");
    assert!(matches!(good.call(Op::Status), Ok(Body::Status(_))));
}

#[test]
fn idle_strangers_do_not_keep_an_owner_out() {
    let run = quiet();
    let mut strangers: Vec<_> = (0..16).map(|_| wire::connect(run.dir()).expect("connect")).collect();
    let mut client = run.client();
    assert!(matches!(client.call(Op::Status), Ok(Body::Status(_))));
    assert!(closed(&mut strangers[0]));
}

#[test]
fn an_unknown_operation_is_refused_and_the_connection_goes_on() {
    let run = quiet();
    let mut client = run.client();
    assert!(matches!(client.call(Op::Unknown), Ok(Body::Refused(_))));
    assert!(
        matches!(client.call(Op::Finish(wire::Finish { epoch: 3 })), Ok(Body::Refused(r)) if r.code == wire::Refusal::NotExited)
    );
    assert!(matches!(
        client.call(Op::Release(Release { epoch: 3, offset: 1 << 40, token: vec![] })),
        Ok(Body::Refused(_))
    ));
    assert!(matches!(client.call(Op::Status), Ok(Body::Status(_))));
}

#[test]
fn a_watcher_gets_one_push_until_it_acknowledges_and_one_at_the_end() {
    let mut run = Run::start("mkfifo go end; echo one; read x <go; echo two; read x <end; exit 6");
    run.until_says("one");
    let fifo = run.place.state.path().join("go");
    let mut client = run.client();
    assert_eq!(client.call(Op::Watch(Watch { offset: 0 })).expect("an answer"), Body::Done);
    let Ok(Body::Spooled(first)) = client.pushed() else { panic!("no push") };
    std::fs::write(&fifo, "\n").expect("go on");
    run.until_says("two");
    // Not acknowledged: the next message is the answer of this request, not a second push.
    client.send(Op::Status).expect("send");
    assert!(matches!(client.receive().map(|r| r.body), Ok(Body::Status(_))));
    client.call(Op::Watch(Watch { offset: first.end })).expect("an answer");
    let Ok(Body::Spooled(second)) = client.pushed() else { panic!("no push") };
    assert!(second.end > first.end);
    client.call(Op::Watch(Watch { offset: second.end })).expect("an answer");
    std::fs::write(run.place.state.path().join("end"), "\n").expect("go on");
    let Ok(Body::Exited(exit)) = client.pushed() else { panic!("no exit") };
    assert_eq!((exit.code, exit.reason), (Some(6), ExitReason::Exited));
    assert_eq!(run.finished(), exit);
}
