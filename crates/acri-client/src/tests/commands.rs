use super::author::{Author, RUN_COMMAND};
use crate::{Client, Error};
use acri::{
    CommandId, ErrorBody, ErrorCode, Payload,
    codec::{self, Format},
    command::{Envelope, OnExpiry, RunHandle, StartRun},
};
use acri_bus::{
    memory::MemoryBus,
    port::{Answer, Commands as _, Request},
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::{sync::Arc, time::Duration};

fn answer<T: serde::Serialize>(value: &T, error: Option<(u16, String)>) -> Answer {
    Answer { format: Format::MessagePack, body: codec::to_msgpack(value).unwrap().into(), error }
}

fn refusal(body: &ErrorBody) -> Answer {
    answer(body, Some((body.code.number(), body.message.clone())))
}

/// Serves an agent with these answers, one a request; `None` answers nothing.
/// Gives back what was asked.
fn serve(bus: MemoryBus, agent: acri::AgentId, answers: Vec<Option<Answer>>) -> tokio::task::JoinHandle<Vec<Bytes>> {
    tokio::spawn(async move {
        let mut requests = bus.serve_agent(agent).await.unwrap();
        let mut asked = Vec::new();
        for answer in answers {
            let Some(Request { body, reply, .. }) = requests.next().await else { break };
            asked.push(body);
            if let (Some(reply), Some(answer)) = (reply, answer) {
                reply.send(answer).await;
            }
        }
        asked
    })
}

async fn served(author: &Author, answers: Vec<Option<Answer>>) -> (Client, tokio::task::JoinHandle<Vec<Bytes>>) {
    let (client, _) = author.client();
    let asked = serve(author.bus.another(), author.agent, answers);
    tokio::task::yield_now().await;
    (client, asked)
}

#[tokio::test(start_paused = true)]
async fn a_command_is_repeated_with_identical_bytes_until_it_is_answered() {
    let author = Author::begin().await;
    let handle = RunHandle { agent: author.agent, run: author.run };
    let busy = ErrorBody::new(ErrorCode::Unavailable, "the actor is being replaced");
    let answers = vec![None, Some(refusal(&busy)), Some(answer(&handle, None))];
    let (client, asked) = served(&author, answers).await;
    assert_eq!(client.start(author.agent, Payload::text("go")).await.unwrap(), handle);
    let asked = asked.await.unwrap();
    assert_eq!(asked.len(), 3);
    assert!(asked.iter().all(|body| *body == asked[0]));
    let envelope: Envelope<StartRun> = codec::from_msgpack(&asked[0]).unwrap();
    assert_eq!((envelope.principal.as_str(), envelope.data.task), ("tester", Payload::text("go")));
    assert!(envelope.id.millis().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_refusal_is_the_answer_and_is_not_repeated() {
    let author = Author::begin().await;
    let open = ErrorBody::new(ErrorCode::FailedPrecondition, "a run is open");
    let (client, asked) = served(&author, vec![Some(refusal(&open))]).await;
    let error = client.start(author.agent, Payload::text("")).await.unwrap_err();
    assert!(matches!(&error, Error::Refused { body, .. } if *body == open), "{error:?}");
    assert_eq!(asked.await.unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn without_an_owner_a_command_is_given_up_at_its_deadline_as_unavailable() {
    let author = Author::begin().await;
    let (client, _) = author.client();
    let begun = tokio::time::Instant::now();
    let error = client.kill(author.agent, author.run, "enough").await.unwrap_err();
    assert!(matches!(error, Error::Unanswered { .. }), "{error:?}");
    assert_eq!(error.code(), ErrorCode::Unavailable);
    let waited = begun.elapsed();
    assert!(waited > client.limits().command_deadline / 2 && waited <= client.limits().command_deadline, "{waited:?}");
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_comes_meanwhile_gets_the_command() {
    let author = Author::begin().await;
    let (client, _) = author.client();
    let handle = RunHandle { agent: author.agent, run: author.run };
    let (bus, agent) = (author.bus.another(), author.agent);
    let late = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_secs(2)).await;
        serve(bus, agent, vec![Some(answer(&handle, None))]).await
    });
    assert_eq!(client.start(author.agent, Payload::text("")).await.unwrap(), handle);
    assert_eq!(late.await.unwrap().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_unknown_agent_or_run_is_not_found_at_once() {
    let author = Author::begin().await;
    let (client, _) = author.client();
    let agent = "aaaa1111-0000-8000-8000-000000000001".parse().unwrap();
    let run = "bbbb1111-0000-8000-8000-000000000011".parse().unwrap();
    let begun = tokio::time::Instant::now();
    let errors = [
        client.status(agent, None).await.unwrap_err(),
        client.status(author.agent, Some(run)).await.unwrap_err(),
        client.start(agent, Payload::text("")).await.unwrap_err(),
        client.kill(author.agent, run, "").await.unwrap_err(),
        client.stop(agent, run, "", None, OnExpiry::Kill).await.unwrap_err(),
        client.remove(agent, "").await.unwrap_err(),
        client.wait(author.agent, run).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.code(), ErrorCode::NotFound, "{error:?}");
    }
    assert_eq!(begun.elapsed().as_secs(), 0);
}

#[tokio::test(start_paused = true)]
async fn what_the_history_proves_is_answered_without_an_owner() {
    let mut author = Author::begin().await;
    let (client, _) = author.client();
    // A repeated Start, whose answer was lost with its node.
    let id = CommandId::from_uuid(RUN_COMMAND);
    let handle = client.start_with_id(id, author.agent, Payload::text("")).await.unwrap();
    assert_eq!(handle.run, author.run);
    author.complete().await;
    assert!(client.kill(author.agent, author.run, "late").await.unwrap().proved);
    let stop = client.stop(author.agent, author.run, "late", None, OnExpiry::Kill).await.unwrap_err();
    assert_eq!(stop.code(), ErrorCode::FailedPrecondition);
    author.seal().await;
    author.own(acri::event::AgentRemoved { reason: String::new() }, None).await;
    assert_eq!(client.remove(author.agent, "again").await.unwrap().agent, author.agent);
    let start = client.start(author.agent, Payload::text("")).await.unwrap_err();
    assert_eq!(start.code(), ErrorCode::FailedPrecondition);
}

#[tokio::test(start_paused = true)]
async fn a_create_that_no_node_takes_says_which_harness_nobody_offers() {
    let author = Author::begin().await;
    let (client, _) = author.client();
    let spec = acri::AgentSpec::new("scripted".parse().unwrap(), vec![]);
    let error = client.create(spec).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    assert!(error.to_string().contains("scripted"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_breaks_a_limit_is_refused_here() {
    let author = Author::begin().await;
    let (client, _) = author.client();
    let reason = "x".repeat(5_000);
    let error = client.kill(author.agent, author.run, reason).await.unwrap_err();
    assert_eq!((error.code(), error.body().field), (ErrorCode::InvalidArgument, Some("reason".to_owned())));
    let task = Payload::text("x".repeat(300 * 1024));
    assert_eq!(client.start(author.agent, task).await.unwrap_err().code(), ErrorCode::TooLarge);
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_is_silent_or_says_not_now_does_not_hide_the_status_for_long() {
    let busy = ErrorBody::new(ErrorCode::Unavailable, "the actor is being replaced");
    for answers in [vec![None; 64], vec![Some(refusal(&busy)); 64]] {
        let author = Author::begin().await;
        let (client, asked) = served(&author, answers).await;
        let begun = tokio::time::Instant::now();
        let told = client.status_told(author.agent, None).await.unwrap();
        assert_eq!(told.status.run.unwrap().run, author.run);
        assert_eq!(told.owner_silent.unwrap().code, ErrorCode::Unavailable);
        let waited = begun.elapsed();
        assert!(waited <= client.limits().query_attempt_timeout, "{waited:?}");
        asked.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn an_owner_that_answers_tells_the_status_itself() {
    let author = Author::begin().await;
    let (reader, _) = author.client();
    let status = reader.folded_status(author.agent, None).await.unwrap();
    let (client, _) = served(&author, vec![Some(answer(&status, None))]).await;
    let told = client.status_told(author.agent, None).await.unwrap();
    assert_eq!(told, crate::StatusTold { status, owner_silent: None });
}

#[tokio::test(start_paused = true)]
async fn each_attempt_may_take_twice_as_long_as_the_one_before_up_to_its_limit() {
    let author = Author::begin().await;
    let limits = crate::Limits {
        attempt_timeout_first: Duration::from_secs(5),
        create_attempt_timeout: Duration::from_secs(15),
        create_deadline: Duration::from_secs(60),
        ..crate::Limits::default()
    };
    let client = Client::with_limits(Arc::new(author.bus.another()), "tester".into(), limits);
    let harness = "scripted".parse().unwrap();
    let mut requests = author.bus.another().serve_harness(&harness).await.unwrap();
    let begun = tokio::time::Instant::now();
    let asked = tokio::spawn(async move {
        let mut times = Vec::new();
        let mut kept = Vec::new();
        while let Some(request) = requests.next().await {
            times.push(begun.elapsed().as_secs());
            // A node that died with the command: nothing says so.
            kept.push(request);
            if times.len() == 5 {
                break;
            }
        }
        times
    });
    let error = client.create(acri::AgentSpec::new(harness, vec![])).await.unwrap_err();
    assert_eq!(error.code(), ErrorCode::Unavailable);
    assert_eq!(asked.await.unwrap(), [0, 5, 15, 30, 45]);
}

#[test]
fn every_operation_can_be_spawned() {
    fn is_send<T: Send>(_: &T) {}
    let check = |client: Client, agent: acri::AgentId, run: acri::RunId| {
        is_send(&client.start(agent, Payload::text("")));
        is_send(&client.stop(agent, run, "", None, OnExpiry::Kill));
        is_send(&client.kill(agent, run, ""));
        is_send(&client.remove(agent, ""));
        is_send(&client.status(agent, Some(run)));
        is_send(&client.wait(agent, run));
        is_send(&client.agents());
    };
    let _ = check;
}
