//! User and password of a server's URL, which async-nats leaves aside.

use async_nats::{ConnectOptions, ServerAddr};

/// Takes them from the first URL that has any; a user without a password is a
/// token, as in the `nats` CLI.
pub(crate) fn from_urls(options: ConnectOptions, urls: &[ServerAddr]) -> ConnectOptions {
    let Some(url) = urls.iter().find(|url| url.has_user_pass()) else { return options };
    match (url.username(), url.password()) {
        (Some(user), Some(password)) => options.user_and_password(user.to_owned(), password.to_owned()),
        (Some(token), None) => options.token(token.to_owned()),
        (None, _) => options,
    }
}
