//! One module a verb: its options, and what it does.

pub(crate) mod caps;
pub(crate) mod completion;
pub(crate) mod create;
pub(crate) mod doctor;
pub(crate) mod events;
pub(crate) mod inspect;
pub(crate) mod kill;
pub(crate) mod logs;
pub(crate) mod node;
pub(crate) mod nodes;
pub(crate) mod ps;
pub(crate) mod replay;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod show;
pub(crate) mod spec;
pub(crate) mod start;
pub(crate) mod status;
pub(crate) mod stop;
pub(crate) mod up;
pub(crate) mod verify;
pub(crate) mod wait;

use crate::{app::App, args::Verb, output::Out};
use anyhow::Result;
use futures_util::{FutureExt as _, Stream, StreamExt as _};

/// The next item; what was written before is flushed if it has to be waited
/// for.
pub(crate) async fn flushed<S: Stream + Unpin>(stream: &mut S, out: &mut Out) -> Result<Option<S::Item>> {
    if let Some(item) = stream.next().now_or_never() {
        return Ok(item);
    }
    out.flush()?;
    Ok(stream.next().await)
}

/// Does what was asked.
pub(crate) async fn perform(app: &mut App, verb: Verb) -> Result<()> {
    match verb {
        Verb::Up(args) => up::perform(app, args).await,
        Verb::Demo(args) => crate::demo::perform(app, args).await,
        Verb::Node(args) => node::perform(app, args).await,
        Verb::Run(args) => run::perform(app, args).await,
        Verb::Create(args) => create::perform(app, args).await,
        Verb::Start(args) => start::perform(app, args).await,
        Verb::Status(args) => status::perform(app, args).await,
        Verb::Ps(args) => ps::perform(app, args).await,
        Verb::Inspect(args) => inspect::perform(app, args).await,
        Verb::Wait(args) => wait::perform(app, args).await,
        Verb::Logs(args) => logs::perform(app, args).await,
        Verb::Events(args) => events::perform(app, args).await,
        Verb::Stop(args) => stop::perform(app, args).await,
        Verb::Kill(args) => kill::perform(app, args).await,
        Verb::Rm(args) => rm::perform(app, args).await,
        Verb::Caps(args) => caps::perform(app, args).await,
        Verb::Nodes(args) => nodes::perform(app, args).await,
        Verb::Verify(args) => verify::perform(app, args).await,
        Verb::Replay(args) => replay::perform(app, args).await,
        Verb::Doctor(args) => doctor::perform(app, args).await,
        Verb::Completion(args) => completion::perform(app, &args),
    }
}
