//! Requests, replies and heartbeats.

use super::{ARRIVAL_TIMEOUT, BusFactory, LOOK_EVERY, Outcome, agent, arrives, case_list, ensure, run_id, text};
use crate::port::{Answer, Fault, Request, RequestError, SharedBus};
use acri::{
    HarnessType, Subject,
    codec::Format,
    subject::{AgentVerb, HarnessVerb, RunVerb},
};
use bytes::Bytes;
use futures_util::StreamExt as _;
use std::time::Duration;

case_list! { false:
    nobody_answers_where_nobody_listens,
    a_request_is_answered_in_kind,
    an_error_travels_with_its_code,
    a_request_without_an_answer_times_out,
    a_listener_is_found_as_soon_as_it_listens,
    a_dropped_listener_is_gone,
    a_harness_request_goes_to_one_of_many,
    a_hostile_reply_subject_is_not_answered,
    an_unknown_content_type_is_told,
    heartbeats_are_heard,
}

fn ok(format: Format, body: &'static str) -> Answer {
    Answer { format, body: Bytes::from_static(body.as_bytes()), error: None }
}

async fn ask(bus: &SharedBus, subject: &Subject, within: Duration) -> Result<Answer, RequestError> {
    bus.request(subject, Format::Json, Bytes::from_static(b"{}"), within).await
}

async fn answer_with(request: Request, answer: Answer) -> Outcome {
    match request.reply {
        Some(reply) => {
            reply.send(answer).await;
            Ok(())
        }
        None => Err("a request without a reply".to_owned()),
    }
}

async fn nobody_answers_where_nobody_listens(factory: &dyn BusFactory) -> Outcome {
    let (bus, other) = (factory.client().await, factory.client().await);
    let subject = Subject::Agent(agent(), AgentVerb::Status);
    let answer = ask(&bus, &subject, ARRIVAL_TIMEOUT).await;
    let told = matches!(&answer, Err(RequestError::NoResponders(at)) if *at == subject.to_string());
    ensure!(told, "{answer:?}");
    // A listener for another agent is none.
    let _other = other.serve_agent(agent()).await.map_err(|fault| text(&fault))?;
    let answer = ask(&bus, &subject, ARRIVAL_TIMEOUT).await;
    ensure!(matches!(answer, Err(RequestError::NoResponders(_))), "{answer:?}");
    Ok(())
}

async fn a_request_is_answered_in_kind(factory: &dyn BusFactory) -> Outcome {
    let (owner, client, agent, run) = (factory.client().await, factory.client().await, agent(), run_id());
    let mut requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
    let subjects = [Subject::Agent(agent, AgentVerb::Start), Subject::Run(agent, run, RunVerb::Kill)];
    for (subject, format) in subjects.into_iter().zip([Format::MessagePack, Format::Json]) {
        let serve = async {
            let request = arrives(&mut requests, "a request").await?;
            ensure!(request.subject == subject.to_string(), "{request:?} for {subject}");
            ensure!(request.format == Some(format) && request.body == "body".as_bytes(), "{request:?}");
            answer_with(request, ok(format, "answer")).await
        };
        let asked = client.request(&subject, format, Bytes::from_static(b"body"), ARRIVAL_TIMEOUT);
        let (served, answer) = tokio::join!(serve, asked);
        served?;
        let answer = answer.map_err(|error| error.to_string())?;
        ensure!(answer.format == format && answer.body == "answer".as_bytes() && answer.error.is_none(), "{answer:?}");
    }
    Ok(())
}

async fn an_error_travels_with_its_code(factory: &dyn BusFactory) -> Outcome {
    let (owner, client, agent) = (factory.client().await, factory.client().await, agent());
    let mut requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
    let subject = Subject::Agent(agent, AgentVerb::Remove);
    let serve = async {
        let request = arrives(&mut requests, "a request").await?;
        let answer = Answer { error: Some((409, "a run is open".to_owned())), ..ok(Format::Json, "{}") };
        answer_with(request, answer).await
    };
    let (served, answer) = tokio::join!(serve, ask(&client, &subject, ARRIVAL_TIMEOUT));
    served?;
    let answer = answer.map_err(|error| error.to_string())?;
    ensure!(answer.error == Some((409, "a run is open".to_owned())), "{answer:?}");
    Ok(())
}

async fn a_request_without_an_answer_times_out(factory: &dyn BusFactory) -> Outcome {
    let (owner, client, agent) = (factory.client().await, factory.client().await, agent());
    let _requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
    let answer = ask(&client, &Subject::Agent(agent, AgentVerb::Status), Duration::from_millis(100)).await;
    let told = matches!(&answer, Err(RequestError::Fault(Fault::Unavailable { .. })));
    ensure!(told, "{answer:?}");
    Ok(())
}

async fn a_listener_is_found_as_soon_as_it_listens(factory: &dyn BusFactory) -> Outcome {
    let (owner, client) = (factory.client().await, factory.client().await);
    for _ in 0..40 {
        let agent = agent();
        let mut requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
        let serve = async {
            let request = arrives(&mut requests, "a request").await?;
            answer_with(request, ok(Format::Json, "here")).await
        };
        let subject = Subject::Agent(agent, AgentVerb::Status);
        let asked = ask(&client, &subject, ARRIVAL_TIMEOUT);
        tokio::pin!(asked);
        let answer = tokio::select! {
            answer = &mut asked => answer,
            served = serve => {
                served?;
                asked.await
            }
        };
        answer.map_err(|error| error.to_string())?;
    }
    Ok(())
}

async fn a_dropped_listener_is_gone(factory: &dyn BusFactory) -> Outcome {
    let (owner, client, agent) = (factory.client().await, factory.client().await, agent());
    drop(owner.serve_agent(agent).await.map_err(|fault| text(&fault))?);
    let gone = async {
        while !matches!(
            ask(&client, &Subject::Agent(agent, AgentVerb::Status), Duration::from_millis(200)).await,
            Err(RequestError::NoResponders(_))
        ) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    tokio::time::timeout(ARRIVAL_TIMEOUT, gone).await.map_err(|_| "it is still there".to_owned())
}

async fn a_harness_request_goes_to_one_of_many(factory: &dyn BusFactory) -> Outcome {
    let harness: HarnessType = format!("suite-{}", uuid::Uuid::new_v4().simple()).parse().expect("it is a name");
    let (one, other, client) = (factory.client().await, factory.client().await, factory.client().await);
    let left = one.serve_harness(&harness).await.map_err(|fault| text(&fault))?;
    let right = other.serve_harness(&harness).await.map_err(|fault| text(&fault))?;
    let count = std::sync::atomic::AtomicU64::new(0);
    let serve = futures_util::stream::select(left, right).for_each(|request| {
        count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        async { drop(answer_with(request, ok(Format::Json, "created")).await) }
    });
    let asked = async {
        for _ in 0..40 {
            let subject = Subject::Harness(harness.clone(), HarnessVerb::Create);
            ask(&client, &subject, ARRIVAL_TIMEOUT).await.map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(())
    };
    tokio::select! {
        outcome = asked => outcome?,
        () = serve => return Err("the listeners ended".to_owned()),
    }
    let served = count.load(std::sync::atomic::Ordering::SeqCst);
    ensure!(served == 40, "40 requests were served {served} times");
    Ok(())
}

async fn a_hostile_reply_subject_is_not_answered(factory: &dyn BusFactory) -> Outcome {
    let (owner, agent, victim) = (factory.client().await, agent(), agent());
    let mut requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
    let subject = Subject::Agent(agent, AgentVerb::Status).to_string();
    let command = Subject::Agent(victim, AgentVerb::Remove).to_string();
    for reply in [command.as_str(), "_INBOXES.suite", "$SRV.suite"] {
        let mut offered = None;
        let handled = Box::pin(async {
            if let Ok(request) = arrives(&mut requests, "a request").await {
                offered = Some(request.reply.is_some());
                // A handler answers whatever it can answer.
                drop(answer_with(request, ok(Format::Json, "{}")).await);
            }
        });
        let answered = factory.raw_request(&subject, reply, "application/json", handled).await;
        ensure!(offered == Some(false) && !answered, "{reply}: offered {offered:?}, answered {answered}");
    }
    let handled = Box::pin(async {
        if let Ok(request) = arrives(&mut requests, "a request").await {
            drop(answer_with(request, ok(Format::Json, "{}")).await);
        }
    });
    let answered = factory.raw_request(&subject, "_INBOX_suite.1", "application/json", handled).await;
    ensure!(answered, "an inbox was not answered");
    Ok(())
}

async fn an_unknown_content_type_is_told(factory: &dyn BusFactory) -> Outcome {
    let (owner, agent) = (factory.client().await, agent());
    let mut requests = owner.serve_agent(agent).await.map_err(|fault| text(&fault))?;
    // A verb that nobody knows comes through as well: who serves it says so.
    let subject = Subject::Agent(agent, AgentVerb::Status).to_string().replace("status", "dance");
    let mut found = None;
    let handled = Box::pin(async {
        if let Ok(request) = arrives(&mut requests, "a request").await {
            found = Some((request.subject.clone(), request.format));
        }
    });
    factory.raw_request(&subject, "_INBOX.suite.2", "text/plain", handled).await;
    ensure!(found == Some((subject.clone(), None)), "{found:?} of {subject}");
    Ok(())
}

async fn heartbeats_are_heard(factory: &dyn BusFactory) -> Outcome {
    let (node, listener) = (factory.client().await, factory.client().await);
    let mut heard = listener.heartbeats().await.map_err(|fault| text(&fault))?;
    let body = Bytes::from(uuid::Uuid::new_v4().to_string());
    node.heartbeat(&"node-1".parse().expect("it is a name"), body.clone()).await;
    // Other cases may beat as well.
    while arrives(&mut heard, "the heartbeat").await? != body {}
    Ok(())
}
