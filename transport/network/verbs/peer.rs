//! A peer as this endpoint knows it: the queue pairs for it, and its endpoint once connected.
//!
//! Place in the data path: under `post` and the completions. On the endpoint's thread.

use super::address::{Address, End, NUMBERS, Port};
use super::channel::Channel;
use super::ibverbs_sys::ibv_ah;
use super::lane::{Lane, Line};
use super::objects::Object;
use super::pair::number;
use crate::base::{Error, Rank, Result};
use crate::transport::network::keys::random;
use crate::transport::network::remote::RemoteRegions;

/// A peer. Its queue pairs are made before it is connected, as its address is of them.
#[derive(Debug)]
pub(super) struct Peer {
    /// By NIC.
    pub writes: Vec<Channel>,
    pub messages: Channel,
    /// Its endpoint.
    pub remote: Option<Remote>,
    /// Regions that this endpoint has taken back from it.
    pub taken_back: u32,
}

/// A peer's endpoint.
#[derive(Debug)]
pub(super) struct Remote {
    pub key: u64,
    /// Distinguishes it from earlier endpoints of the same rank.
    pub channel: u64,
    pub ports: Vec<Port>,
    pub regions: RemoteRegions,
    /// Writes that are outstanding, by NIC.
    pub outstanding: Vec<u32>,
    /// Regions that it has taken back from this endpoint.
    pub revoked: u32,
    /// Ways to its datagrams, by NIC, and how often the NIC's port had changed when each was made.
    pub handles: Vec<Option<(u32, Object<ibv_ah>)>>,
    /// When another may be made.
    pub handle_ns: u64,
}

impl Remote {
    pub fn new(address: &Address, channel: u64) -> Remote {
        Remote {
            key: address.key,
            channel,
            ports: address.ports.clone(),
            regions: RemoteRegions::default(),
            outstanding: vec![0; address.ports.len()],
            revoked: 0,
            handles: Vec::with_capacity(address.ports.len()),
            handle_ns: 0,
        }
    }
}

impl Peer {
    /// Makes queue pairs for a peer: of writes with room for so many, each of so many requests, and of messages.
    ///
    /// # Errors
    /// `Transport` if a device has none left.
    pub fn new(lanes: &mut [Lane], rank: Rank, posts: u32, requests: u32, messages: u32) -> Result<Peer> {
        let mut made = Vec::new();
        let peer = Peer::make(lanes, rank, (posts, requests), messages, &mut made);
        if peer.is_err() {
            for (nic, number) in made {
                lanes.iter_mut().skip(nic).take(1).for_each(|lane| lane.disown(number));
            }
        }
        peer
    }

    fn make(
        lanes: &mut [Lane],
        rank: Rank,
        (posts, requests): (u32, u32),
        messages: u32,
        made: &mut Vec<(usize, u32)>,
    ) -> Result<Peer> {
        let mut channel = |lane: &mut Lane, nic, line, room: u32, requests| {
            let (pair, inline) = lane.pair(rank, line, requests)?;
            let own = End { number: number(&pair), packet: random()? as u32 & NUMBERS };
            made.push((nic, own.number));
            Ok::<Channel, Error>(Channel::new(pair, own, inline, room as usize))
        };
        let writes = lanes.iter_mut().enumerate();
        let writes = writes.map(|(nic, lane)| channel(lane, nic, Line::Writes, posts, posts * requests));
        let writes = writes.collect::<Result<Vec<Channel>>>()?;
        let first = lanes.first_mut().ok_or_else(|| Error::config("nics", 0, "use at least 1"))?;
        let messages = channel(first, 0, Line::Messages, messages, messages)?;
        Ok(Peer { writes, messages, remote: None, taken_back: 0 })
    }

    /// Whether a connection by a NIC is being closed.
    pub fn is_closing(&self, nic: usize, line: Line) -> bool {
        match line {
            Line::Writes => self.writes.get(nic).is_some_and(|channel| channel.resumption.is_closing()),
            Line::Messages => self.messages.resumption.is_closing(),
        }
    }

    /// The connection by a NIC.
    pub fn channel(&mut self, nic: usize, line: Line) -> Option<&mut Channel> {
        match line {
            Line::Writes => self.writes.get_mut(nic),
            Line::Messages => (nic == 0).then_some(&mut self.messages),
        }
    }

    /// All connections.
    pub fn lines(&self) -> impl Iterator<Item = (usize, Line)> + use<> {
        (0..self.writes.len()).map(|nic| (nic, Line::Writes)).chain([(0, Line::Messages)])
    }

    /// This side's ends, of messages and of writes.
    pub fn ends(&self) -> (End, Vec<End>) {
        (self.messages.own, self.writes.iter().map(|channel| channel.own).collect())
    }
}
