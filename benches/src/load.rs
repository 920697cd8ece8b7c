//! Many of the same at once.

use anyhow::Result;
use futures_util::{StreamExt as _, TryStreamExt as _, stream};

/// Carries out `count` of them, at most `at_once` at a time, and collects what
/// they give, in any order.
pub(crate) async fn many<T, F>(count: usize, at_once: usize, each: impl Fn(usize) -> F) -> Result<Vec<T>>
where
    F: Future<Output = Result<T>>,
{
    stream::iter((0..count).map(each)).buffer_unordered(at_once).try_collect().await
}
