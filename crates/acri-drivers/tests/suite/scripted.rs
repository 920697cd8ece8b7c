//! The driver in memory.

use acri::{
    AgentId, AgentSpec, ErrorCode, RunId, Timestamp,
    spec::{Completion, Stdin},
};
use acri_drivers::{
    driver::Driver,
    scripted::{ScriptedDriver, World},
    suite::{Fixture, Refused},
};
use async_trait::async_trait;
use std::sync::Arc;

struct Scripted(World);

fn fixture() -> Scripted {
    Scripted(World::new(|| Timestamp::from_micros(1_764_500_000_000_000)))
}

#[async_trait]
impl Fixture for Scripted {
    fn driver(&self) -> Arc<dyn Driver> {
        Arc::new(ScriptedDriver::new(self.0.clone()))
    }

    fn spec(&self, script: &[&str]) -> AgentSpec {
        AgentSpec::new("scripted".parse().unwrap(), script.iter().map(|&step| step.to_owned()).collect())
    }

    async fn let_go(&self, agent: AgentId, run: RunId, name: &str) {
        self.0.release(agent, run, name);
    }

    async fn crash(&self, agent: AgentId, run: RunId) {
        self.0.crash(agent, run);
    }

    async fn lose(&self, agent: AgentId, run: RunId) {
        self.0.lose(agent, run);
    }

    fn refused(&self) -> Vec<Refused> {
        let spec = || self.spec(&["exit 0"]);
        vec![
            Refused {
                why: "a step that is none",
                spec: self.spec(&["sing"]),
                code: ErrorCode::InvalidArgument,
                field: "command",
            },
            Refused {
                why: "records on standard input",
                spec: AgentSpec { stdin: Stdin::Records, ..spec() },
                code: ErrorCode::Unsupported,
                field: "stdin",
            },
            Refused {
                why: "completion by record",
                spec: AgentSpec { completion: Completion::Record, ..spec() },
                code: ErrorCode::Unsupported,
                field: "completion",
            },
        ]
    }
}

acri_drivers::driver_suite!(suite, super::fixture);

mod more {
    use super::{Scripted, fixture};
    use acri::{AgentId, CommandId, Incarnation, Payload, RunId, id::Epoch};
    use acri_drivers::{
        driver::{Driver, Fault, Owner, Provisioned, Start, StartError},
        scripted::{Effect, Failure, ScriptedDriver},
        suite::Fixture,
    };
    use std::sync::Arc;
    use uuid::Uuid;

    fn order(fixture: &Scripted, number: u64, script: &[&str]) -> Start {
        let agent = AgentId::from_uuid(Uuid::from_u64_pair(1, number));
        Start {
            agent,
            run: RunId::derive(agent, CommandId::from_uuid(Uuid::from_u64_pair(2, number))),
            spec: fixture.spec(script),
            provisioned: Provisioned::default(),
            task: Payload::text(""),
            owner: Owner { epoch: Epoch(1), incarnation: Incarnation::from_uuid(Uuid::nil()) },
        }
    }

    #[tokio::test]
    async fn ten_thousand_idle_runs_take_no_task() {
        let fixture = fixture();
        let driver = ScriptedDriver::new(fixture.0.clone());
        let mut sessions = Vec::new();
        for number in 0..10_000 {
            sessions.push(driver.start(&order(&fixture, number, &["idle"])).await.unwrap());
        }
        assert_eq!(tokio::runtime::Handle::current().metrics().num_alive_tasks(), 0);
        assert!(fixture.0.runs().into_iter().all(|(agent, run)| fixture.0.is_alive(agent, run)));
    }

    #[tokio::test]
    async fn an_effect_fails_before_or_after_it_happens_as_ordered() {
        let fixture = fixture();
        let (world, driver) = (&fixture.0, ScriptedDriver::new(fixture.0.clone()));
        let order = order(&fixture, 1, &["idle"]);
        for (failure, starts) in [(Failure::Before, 0), (Failure::After, 1)] {
            world.fail_next(Effect::Start, failure);
            let started = driver.start(&order).await.map(drop);
            assert!(matches!(started, Err(StartError::Fault(Fault::Unreachable { .. }))), "{started:?}");
            assert_eq!(world.starts(order.agent, order.run), starts);
        }
        driver.start(&order).await.unwrap();
        assert_eq!(world.starts(order.agent, order.run), 1);
    }

    #[tokio::test]
    async fn a_script_may_be_the_tasks_text() {
        let fixture = fixture();
        let mut order = order(&fixture, 1, &[]);
        order.task = Payload::text("say from the task\nexit 9");
        let session = ScriptedDriver::new(fixture.0.clone()).start(&order).await.unwrap();
        assert_eq!(session.exit().await.unwrap().status.unwrap().code, Some(9));
    }

    #[tokio::test]
    async fn a_tree_that_resists_is_told_gone_only_when_it_is() {
        let fixture = fixture();
        let (world, driver) = (fixture.0.clone(), Arc::new(ScriptedDriver::new(fixture.0.clone())));
        let order = order(&fixture, 1, &["idle"]);
        let session = driver.start(&order).await.unwrap();
        world.set_unkillable(order.agent, order.run, true);
        let request = acri_drivers::driver::KillRequest {
            command: CommandId::from_uuid(Uuid::nil()),
            principal: String::new(),
            reason: String::new(),
            owner: order.owner,
        };
        let switch = driver.kill_switch(order.agent, order.run);
        let killing = tokio::spawn(async move { switch.kill(request).await });
        tokio::task::yield_now().await;
        assert!(!killing.is_finished() && world.is_alive(order.agent, order.run));
        world.set_unkillable(order.agent, order.run, false);
        killing.await.unwrap().unwrap();
        assert!(session.exit().await.unwrap().killed.is_some());
    }
}
