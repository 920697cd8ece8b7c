//! A stranger on the bus: the NATS protocol by hand, with whatever reply
//! subject and body it likes.

use crate::within;
use serde_json::Value;
use std::collections::BTreeMap;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// A message as it came.
#[derive(Debug, Clone)]
pub struct Message {
    /// Where it was sent.
    pub subject: String,
    /// The status line's code, where there is one: 503 means that nobody
    /// listens.
    pub status: Option<u16>,
    /// Its headers.
    pub headers: BTreeMap<String, String>,
    /// Its body.
    pub body: Vec<u8>,
}

impl Message {
    /// The number of an error answer.
    #[must_use]
    pub fn error(&self) -> Option<u16> {
        self.headers.get("Nats-Service-Error-Code")?.parse().ok()
    }
}

/// The connection.
#[derive(Debug)]
pub struct Raw {
    reading: BufReader<OwnedReadHalf>,
    writing: OwnedWriteHalf,
    subscriptions: u64,
    inbox: String,
}

impl Raw {
    /// Connects to `nats://user:password@host:port`.
    ///
    /// # Panics
    /// If that does not work.
    pub async fn connect(url: &str) -> Self {
        let rest = url.strip_prefix("nats://").expect("a NATS URL");
        let (login, address) = rest.split_once('@').expect("a login");
        let (user, password) = login.split_once(':').expect("a password");
        let stream = TcpStream::connect(address).await.expect("the bus");
        let (reading, writing) = stream.into_split();
        let inbox = format!("_INBOX.{}", uuid::Uuid::new_v4().simple());
        let mut raw = Self { reading: BufReader::new(reading), writing, subscriptions: 0, inbox };
        let info = raw.line().await;
        assert!(info.starts_with("INFO "), "{info}");
        let options = serde_json::json!({
            "verbose": false, "pedantic": false, "headers": true, "no_responders": true,
            "user": user, "pass": password, "lang": "test", "version": "0",
        });
        raw.write(format!("CONNECT {options}\r\n").as_bytes()).await;
        raw.flush().await;
        raw
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.writing.write_all(bytes).await.expect("the bus takes it");
    }

    async fn line(&mut self) -> String {
        let mut line = String::new();
        let read = within("a line of the bus", self.reading.read_line(&mut line)).await;
        assert!(read.expect("a line of the bus") > 0, "the bus ended the connection");
        line.trim_end().to_owned()
    }

    /// Waits until the server has taken everything so far. What arrives
    /// meanwhile is dropped.
    pub async fn flush(&mut self) {
        self.write(b"PING\r\n").await;
        while self.next_or_pong().await.is_some() {}
    }

    /// Subscribes.
    pub async fn subscribe(&mut self, subject: &str) {
        self.subscriptions += 1;
        let line = format!("SUB {subject} {}\r\n", self.subscriptions);
        self.write(line.as_bytes()).await;
        self.flush().await;
    }

    /// Publishes anything anywhere.
    pub async fn publish(&mut self, subject: &str, reply: Option<&str>, headers: &[(&str, &str)], body: &[u8]) {
        let reply = reply.map(|reply| format!(" {reply}")).unwrap_or_default();
        if headers.is_empty() {
            let line = format!("PUB {subject}{reply} {}\r\n", body.len());
            return self.write(&[line.as_bytes(), body, b"\r\n"].concat()).await;
        }
        let lines: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        self.publish_head(subject, &reply, format!("NATS/1.0\r\n{lines}\r\n").as_bytes(), body).await;
    }

    /// The same with a head of any bytes; `reply` is empty, or a blank and a
    /// subject.
    pub async fn publish_head(&mut self, subject: &str, reply: &str, head: &[u8], body: &[u8]) {
        let mut bytes = format!("HPUB {subject}{reply} {} {}\r\n", head.len(), head.len() + body.len()).into_bytes();
        bytes.extend_from_slice(head);
        bytes.extend_from_slice(body);
        bytes.extend_from_slice(b"\r\n");
        self.write(&bytes).await;
    }

    /// Asks and waits for the answer.
    pub async fn request(&mut self, subject: &str, headers: &[(&str, &str)], body: &[u8]) -> Message {
        let inbox = format!("{}.{}", self.inbox, uuid::Uuid::new_v4().simple());
        self.subscribe(&inbox).await;
        self.publish(subject, Some(&inbox), headers, body).await;
        loop {
            let message = within("an answer", self.next()).await;
            if message.subject == inbox {
                return message;
            }
        }
    }

    /// Calls the JetStream API.
    ///
    /// # Panics
    /// If it answers an error.
    pub async fn api(&mut self, method: &str, body: &Value) -> Value {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let answer = self.request(&format!("$JS.API.{method}"), &[], body.as_bytes()).await;
        let answer: Value = serde_json::from_slice(&answer.body).expect("JSON");
        assert!(answer.get("error").is_none(), "{method}: {answer}");
        answer
    }

    /// The next message.
    pub async fn next(&mut self) -> Message {
        loop {
            if let Some(message) = self.next_or_pong().await {
                return message;
            }
        }
    }

    async fn next_or_pong(&mut self) -> Option<Message> {
        loop {
            let line = self.line().await;
            let mut words = line.split(' ');
            match words.next() {
                Some("PONG") => return None,
                Some("PING") => self.write(b"PONG\r\n").await,
                Some("MSG") => {
                    let words: Vec<_> = words.collect();
                    let length = words.last().and_then(|word| word.parse().ok()).expect("a length");
                    let body = self.bytes(length).await;
                    let subject = words[0].to_owned();
                    return Some(Message { subject, status: None, headers: BTreeMap::new(), body });
                }
                Some("HMSG") => {
                    let words: Vec<_> = words.collect();
                    let number = |back: usize| -> usize { words[words.len() - back].parse().expect("a length") };
                    let (head, length) = (number(2), number(1));
                    let bytes = self.bytes(length).await;
                    let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
                    let mut lines = text.lines();
                    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
                    let headers = lines
                        .filter_map(|line| line.split_once(':'))
                        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
                        .collect();
                    let (subject, body) = (words[0].to_owned(), bytes[head..].to_vec());
                    return Some(Message { subject, status, headers, body });
                }
                Some("INFO" | "+OK") => {}
                other => panic!("the bus says {other:?}: {line}"),
            }
        }
    }

    async fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length + 2];
        self.reading.read_exact(&mut bytes).await.expect("a body");
        bytes.truncate(length);
        bytes
    }
}
