//! Peers that come, are replaced and go.
//!
//! Place in the data path: none; building contexts, and resets. May wait for a device to end what it took.

use super::address::{Address, Port};
use super::lane::Line;
use super::peer::{Peer, Remote};
use super::recovery::next;
use super::{COUNTED_NS, Late, PEER_MESSAGES, VerbsEndpoint};
use crate::base::{Error, Rank, Result};
use crate::transport::network::clock::coarse_now_ns;
use crate::transport::network::flight::{Outcome, Pending};
use crate::transport::network::{Event, Reason};

impl VerbsEndpoint {
    /// The peer, with queue pairs for it, which are made if there are none.
    pub(super) fn prepare(&mut self, rank: Rank) -> Result<&mut Peer> {
        if !self.peers.contains_key(&rank) {
            let (posts, requests) = (self.limits.posts, self.config.requests());
            let peer = Peer::new(&mut self.lanes, rank, posts, requests, PEER_MESSAGES)?;
            self.peers.insert(rank, peer);
            let (peers, nics) = (self.peers.len(), self.lanes.len());
            self.waiting.reserve(peers * nics);
            self.mute.reserve(peers);
            self.unwell.reserve(peers * (nics + 1));
            self.pending.reserve(peers * nics * self.limits.posts as usize);
        }
        self.peers.get_mut(&rank).ok_or_else(|| Error::argument("peer", rank, "connect to it first"))
    }

    /// Connects to an address; an error leaves everything as it was, unless the way to the peer breaks meanwhile.
    pub(super) fn join(&mut self, address: &Address) -> Result<()> {
        let refuse = |why: String| Err(unusable(address.rank, why));
        let (nics, there) = (self.lanes.len(), address.ports.len());
        if there != nics {
            return refuse(format!("is of an endpoint with {there} NICs, not {nics}"));
        }
        let own = self.config.service_level;
        if let Some(port) = address.ports.iter().find(|port| port.route.service_level != own) {
            return refuse(format!("uses service level {}, not {own}", port.route.service_level));
        }
        let kinds = self.lanes.iter().map(|lane| lane.device.route(own).kind).zip(&address.ports);
        if let Some((own, port)) = kinds.into_iter().find(|(own, port)| *own != port.route.kind) {
            let kind =
                |kind: u8| ["InfiniBand", "RoCE v1", "RoCE v2"].get(usize::from(kind)).copied().unwrap_or("other");
            return refuse(format!("has a GID of {}, not {}", kind(port.route.kind), kind(own)));
        }
        let mut routes = self.lanes.iter().map(|lane| lane.device.route(own)).zip(&address.ports);
        if let Some(why) = routes.find_map(|(own, port)| own.obstacle(&port.route)) {
            return refuse(why);
        }
        let known = self.peers.get_mut(&address.rank).and_then(|peer| peer.remote.as_mut());
        if let Some(remote) = known.filter(|remote| remote.key == address.key) {
            return remote.regions.update(&address.regions, nics).or_else(refuse);
        }
        let mut remote = Remote::new(address, self.channels + 1);
        if let Err(why) = remote.regions.update(&address.regions, nics) {
            return refuse(why);
        }
        for (lane, port) in self.lanes.iter_mut().zip(&address.ports) {
            remote.handles.push(Some((lane.changes, lane.handle(&port.route, &self.config)?)));
        }
        self.channels += 1;
        self.prepare(address.rank)?;
        self.forget(address.rank)?;
        let connected = self.start(address);
        match self.peers.get_mut(&address.rank) {
            Some(peer) if connected.is_ok() => {
                peer.remote = Some(remote);
                peer.taken_back = 0;
            }
            _ => self.abandon(address.rank),
        }
        connected
    }

    /// Opens all queue pairs towards an endpoint.
    pub(super) fn start(&mut self, address: &Address) -> Result<()> {
        // Either side has it, and no other pair of endpoints.
        let salt = self.key ^ address.key;
        let salt = (salt ^ salt >> 32) as u32;
        let VerbsEndpoint { peers, lanes, config, openings, .. } = self;
        let Some(peer) = peers.get_mut(&address.rank) else { return Ok(()) };
        let lines = address.ports.iter().enumerate().map(|(nic, port)| (nic, Line::Writes, port.writes));
        for (nic, line, other) in lines.chain([(0, Line::Messages, address.messages)]) {
            let (Some(channel), Some(lane)) = (peer.channel(nic, line), lanes.get_mut(nic)) else { continue };
            let Some(Port { route, .. }) = address.ports.get(nic) else { continue };
            channel.start(other, salt);
            lane.open_pair(&channel.pair, (channel.own, other), route, (salt, 0), config)?;
            channel.opening = next(openings);
        }
        Ok(())
    }

    /// Forgets a peer's endpoint: what waits for it or is under way fails. Its queue pairs stay, closed.
    pub(super) fn forget(&mut self, rank: Rank) -> Result<()> {
        let Some(peer) = self.peers.get_mut(&rank) else { return Ok(()) };
        if peer.remote.is_none() {
            return Ok(());
        }
        for (nic, line) in peer.lines() {
            if let (Some(channel), Some(lane)) = (peer.channel(nic, line), self.lanes.get_mut(nic)) {
                if channel.resumption.is_open() {
                    channel.resumption.close();
                    channel.drained |= lane.break_pair(&channel.pair).is_err();
                } else if !channel.resumption.is_closing() {
                    // Its queue pair has been reset.
                    channel.drained = true;
                }
            }
        }
        // What came before is handed out later, so that none of it is taken for the next endpoint's.
        let mut late = std::mem::take(&mut self.late);
        let mut keep = |event: Event<'_>| match event {
            Event::Imm { imm } => late.push_back(Late::Immediate(imm.bits())),
            Event::Message { peer, bytes } => late.push_back(Late::Message(peer, bytes.to_vec())),
            _ => {}
        };
        let read = self.read_rest(rank, &mut keep);
        self.late = late;
        read?;
        self.abandon(rank);
        Ok(())
    }

    /// Reads all that a peer's queue pairs, which were closed, still report. Waits for the devices to say so.
    pub(super) fn read_rest(&mut self, rank: Rank, keep: &mut dyn FnMut(Event<'_>)) -> Result<()> {
        let until_ns = coarse_now_ns().saturating_add(COUNTED_NS);
        loop {
            self.read_events()?;
            let drained = self.peers.get_mut(&rank).is_none_or(|peer| {
                peer.lines().all(|(nic, line)| peer.channel(nic, line).is_none_or(|channel| channel.drained))
            });
            for nic in 0..self.lanes.len() {
                self.drain_into_pending(nic, keep)?;
            }
            if drained || coarse_now_ns() >= until_ns {
                return Ok(());
            }
            std::thread::yield_now();
        }
    }

    /// Fails what waits for a peer or is under way to it.
    pub(super) fn abandon(&mut self, rank: Rank) {
        let VerbsEndpoint { peers, lanes, pending, messages, .. } = self;
        let Some(peer) = peers.get_mut(&rank) else { return };
        for (nic, line) in peer.lines() {
            let (Some(channel), Some(lane)) = (peer.channel(nic, line), lanes.get_mut(nic)) else { continue };
            _ = lane.shut_pair(&channel.pair);
            channel.other = None;
            for number in channel.posted.drain(..).chain(channel.unsent.drain(..)) {
                if line == Line::Messages {
                    messages.end(number);
                } else if let Some(flight) = lane.writes.end(number) {
                    let outcome = Outcome::Failed(Reason::Flushed.into());
                    pending.push_back(Pending { nic, flight, outcome });
                }
            }
        }
        peer.remote = None;
        self.revocations.forget(rank);
        self.waiting.retain(|(other, _)| *other != rank);
        self.mute.retain(|other| *other != rank);
        self.notices.retain(|(other, _)| *other != rank);
        self.unwell.retain(|(other, ..)| *other != rank);
    }

    /// Breaks the connections of the peers that have not let go of a region, which then hear of it before they post.
    pub(super) fn cut_off(&mut self, late: &[Rank]) {
        for rank in late {
            for nic in 0..self.lanes.len() {
                self.break_connection(*rank, nic, Line::Writes);
            }
        }
    }
}

/// The refusal of an address.
pub(super) fn unusable(rank: Rank, why: String) -> Error {
    let advice = "exchange the addresses anew, between ranks with the same version of tokenyard, NICs and settings";
    Error::transport(format!("address of rank {rank} {why}"), advice)
}
