//! Connections that break, and how they are taken up again: what an endpoint does with `Resumption`.
//!
//! Place in the data path: beside it, in polls. Nothing here waits, but for the kernel, which looks a peer's hardware
//! address up when a queue pair is opened.

use super::channel::Channel;
use super::config::VerbsConfig;
use super::device::Reported;
use super::ibverbs_sys::{IBV_WC_SUCCESS, ibv_wc};
use super::lane::{GLOBAL_HEADER, Lane, Line};
use super::mark::OPENINGS;
use super::report::{self, Letter};
use super::{COUNTED_NS, REPORT_NS, RETRY_NS, VerbsEndpoint};
use crate::base::{Error, Rank, Result};
use crate::transport::network::clock::coarse_now_ns;
use crate::transport::network::flight::{Outcome, Pending};
use crate::transport::network::{Event, Reason};

impl VerbsEndpoint {
    pub(super) fn channel(&mut self, rank: Rank, nic: usize, line: Line) -> Option<&mut Channel> {
        self.peers.get_mut(&rank)?.channel(nic, line)
    }

    pub(super) fn break_connection(&mut self, rank: Rank, nic: usize, line: Line) {
        let VerbsEndpoint { peers, lanes, unwell, config, .. } = self;
        let channel = peers.get_mut(&rank).and_then(|peer| peer.channel(nic, line));
        if let (Some(channel), Some(lane)) = (channel, lanes.get_mut(nic)) {
            break_off(lane, channel, unwell, (rank, nic, line), (coarse_now_ns(), config));
        }
    }

    /// Takes a report in.
    pub(super) fn take_report(&mut self, nic: usize, entry: &ibv_wc, place: u32) {
        let Some(lane) = self.lanes.get_mut(nic) else { return };
        if entry.status != IBV_WC_SUCCESS {
            // All of its receives end like this; they are posted again once it works again.
            lane.is_mute = true;
            return;
        }
        let bytes = lane.reports.take(place);
        lane.receive_report(place);
        let whole = entry.byte_len as usize >= GLOBAL_HEADER + report::BYTES;
        let letter = bytes.get(GLOBAL_HEADER..).filter(|_| whole).and_then(Letter::decode);
        let Some(letter) = letter.filter(|letter| letter.to == self.key && usize::from(letter.nic) == nic) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(&letter.rank) else { return };
        if peer.remote.as_ref().is_none_or(|remote| remote.key != letter.from) {
            return;
        }
        // Others know the keys, too, but not how to send as the peer's queue pair.
        let sender = peer.remote.as_ref().and_then(|remote| remote.ports.get(nic)).map(|port| port.datagrams);
        if sender != Some(entry.src_qp) {
            return;
        }
        let Some(channel) = peer.channel(nic, letter.line) else { return };
        if channel.notices.wrapping_sub(letter.notices) as i32 > 0 {
            // Older than what is known; its counts may be, too, and a newer one comes.
            return;
        }
        channel.notices = letter.notices;
        let due = channel.resumption.hear(letter.report);
        let at = (letter.rank, nic, letter.line);
        if due.close {
            self.close(at);
        }
        if due.answer {
            self.report(at, coarse_now_ns());
        }
    }

    /// Closes a queue pair behind what `Resumption` has decided.
    pub(super) fn close(&mut self, at: (Rank, usize, Line)) {
        let VerbsEndpoint { peers, lanes, unwell, config, .. } = self;
        let (rank, nic, line) = at;
        let channel = peers.get_mut(&rank).and_then(|peer| peer.channel(nic, line));
        if let (Some(channel), Some(lane)) = (channel, lanes.get_mut(nic)) {
            shut(lane, channel, unwell, at, (coarse_now_ns(), config));
        }
    }

    /// Sends the report of a connection, if it has something to report.
    pub(super) fn report(&mut self, (rank, nic, line): (Rank, usize, Line), now_ns: u64) {
        let VerbsEndpoint { peers, lanes, config, key, rank: own, .. } = self;
        let (Some(peer), Some(lane)) = (peers.get_mut(&rank), lanes.get_mut(nic)) else { return };
        let notices = peer.taken_back;
        let Some(channel) = peer.channel(nic, line) else { return };
        let Some(report) = channel.resumption.report() else { return };
        let [least, most] = REPORT_NS;
        let stalled = if channel.stalled_ns == 0 { 0 } else { now_ns.saturating_sub(channel.stalled_ns) };
        channel.report_ns = now_ns.saturating_add((stalled / 4).clamp(least, most));
        let Some(remote) = peer.remote.as_mut() else { return };
        let (Some(port), Some(handle)) = (remote.ports.get(nic).copied(), remote.handles.get_mut(nic)) else { return };
        // The port may have its GID at another place now. A handle stays while a report may be on its way by it.
        let stale = handle.as_ref().is_none_or(|(changes, _)| *changes != lane.changes);
        if stale && now_ns >= remote.handle_ns && lane.reports_are_sent() && lane.device.is_active() {
            let began_ns = coarse_now_ns();
            *handle = lane.handle(&port.route, config).ok().map(|handle| (lane.changes, handle));
            remote.handle_ns = after(began_ns);
        }
        let Some((_, handle)) = handle else { return };
        let Some(place) = lane.sent_reports.take(()) else { return };
        let letter = Letter { rank: *own, from: *key, to: remote.key, nic: nic as u8, line, report, notices };
        lane.reports.store(place, &letter.encode());
        if !lane.send_report(place, report::BYTES, handle, port.datagrams) {
            lane.sent_reports.end(place);
        }
    }

    /// Goes on with the connections that are broken; answers how many events that gave. What the devices have reported
    /// has been read.
    pub(super) fn tend(&mut self, now_ns: u64, on_event: &mut dyn FnMut(Event<'_>)) -> Result<usize> {
        let mut events = 0;
        for at in 0..self.unwell.len() {
            let Some(place) = self.unwell.get(at).copied() else { break };
            events += self.tend_one(place, now_ns, on_event)?;
        }
        for nic in 0..self.lanes.len() {
            if self.lanes.get(nic).is_some_and(|lane| lane.is_mute) {
                events += self.drain(nic, on_event)?;
                let VerbsEndpoint { lanes, config, .. } = self;
                lanes.get_mut(nic).map_or(Ok(()), |lane| lane.revive_datagrams(config))?;
            }
        }
        let peers = &mut self.peers;
        self.unwell.retain(|(rank, nic, line)| {
            let Some(peer) = peers.get_mut(rank) else { return false };
            let revoked = peer.remote.as_ref().map_or(0, |remote| remote.revoked);
            peer.channel(*nic, *line).is_some_and(|channel| {
                let behind = *line == Line::Writes && channel.notices.wrapping_sub(revoked) as i32 > 0;
                let unwell = !channel.resumption.may_post() || behind && !channel.unsent.is_empty();
                if !unwell && channel.posted.is_empty() && channel.unsent.is_empty() {
                    channel.stalled_ns = 0;
                }
                unwell
            })
        });
        Ok(events)
    }

    pub(super) fn tend_one(
        &mut self,
        place: (Rank, usize, Line),
        now_ns: u64,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<usize> {
        let (rank, nic, line) = place;
        let mut events = 0;
        let Some(channel) = self.channel(rank, nic, line) else { return Ok(0) };
        if channel.resumption.is_closing() {
            if !channel.drained && now_ns < channel.counted_ns {
                return Ok(0);
            }
            // The device takes nothing more for it. What it took is counted before the queue pair is reset, which drops
            // completions on some devices, and behind that, since it does not on others. From the reset on the device
            // neither reads sources nor stores for this connection.
            events += self.drain(nic, on_event)?;
            let VerbsEndpoint { peers, lanes, .. } = self;
            let (Some(peer), Some(lane)) = (peers.get_mut(&rank), lanes.get_mut(nic)) else { return Ok(events) };
            let Some(channel) = peer.channel(nic, line) else { return Ok(events) };
            if lane.shut_pair(&channel.pair).is_err() {
                return Ok(events);
            }
            events += self.drain(nic, on_event)?;
            let Some(channel) = self.channel(rank, nic, line) else { return Ok(events) };
            channel.closed();
            channel.report_ns = now_ns;
        }
        let late = {
            let VerbsEndpoint { peers, config, .. } = self;
            let channel = peers.get_mut(&rank).and_then(|peer| peer.channel(nic, line));
            channel.is_some_and(|channel| channel.is_late(now_ns, config))
        };
        if late {
            self.give_up(place, now_ns);
        }
        let Some(channel) = self.channel(rank, nic, line) else { return Ok(events) };
        match channel.resumption.ready() {
            Some(count) if !channel.lost && !channel.admits(count) => {
                // More was acknowledged, or less was ever posted. Nothing of it can be believed.
                channel.lost = true;
                let done = channel.done;
                log::error!(target: crate::base::targets::NETWORK, "rank {rank} counts {count} arrivals by NIC {nic}, not {done} or more: it is given up");
            }
            Some(count) if !channel.lost && now_ns >= channel.retry_ns => {
                self.confirm(rank, nic, line, count);
                self.end_offender(rank, nic, line);
                self.open_again(place, count, now_ns);
            }
            _ => {}
        }
        let due = self
            .channel(rank, nic, line)
            .is_some_and(|channel| !channel.resumption.may_post() && now_ns >= channel.report_ns);
        if due {
            self.report(place, now_ns);
        }
        Ok(events + self.hand_out_pending(on_event))
    }

    /// Ends the write that broke its connection.
    pub(super) fn end_offender(&mut self, rank: Rank, nic: usize, line: Line) {
        let VerbsEndpoint { peers, lanes, pending, messages, revocations, .. } = self;
        let Some(channel) = peers.get_mut(&rank).and_then(|peer| peer.channel(nic, line)) else { return };
        // If the peer has not taken all before it, it is posted again, and refused again.
        let Some((_, failure)) = channel.offence.take().filter(|(sequence, _)| *sequence == channel.done) else {
            return;
        };
        let Some(number) = channel.posted.pop_front() else { return };
        if line == Line::Messages {
            messages.end(number);
        } else if let Some(flight) = lanes.get_mut(nic).and_then(|lane| lane.writes.end(number)) {
            let revoked = revocations.is_revoked(rank, flight.write.target.region);
            let outcome = if revoked { Outcome::Dropped } else { Outcome::Failed(failure) };
            pending.push_back(Pending { nic, flight, outcome });
        }
    }

    /// Opens a connection again, behind what its peer has taken. Where the port is not there, it stays closed, and is
    /// tried again.
    pub(super) fn open_again(&mut self, (rank, nic, line): (Rank, usize, Line), count: u64, now_ns: u64) {
        let VerbsEndpoint { peers, lanes, config, waiting, mute, openings, .. } = self;
        let (Some(peer), Some(lane)) = (peers.get_mut(&rank), lanes.get_mut(nic)) else { return };
        let Some(route) = peer.remote.as_ref().and_then(|remote| remote.ports.get(nic)).map(|port| port.route) else {
            return;
        };
        let Some(channel) = peer.channel(nic, line) else { return };
        let Some(other) = channel.other else { return };
        channel.retry_ns = now_ns.saturating_add(RETRY_NS);
        if !lane.device.is_active() {
            return;
        }
        let began_ns = coarse_now_ns();
        let incarnation = (channel.salt, channel.resumption.incarnation().wrapping_add(1));
        if let Err(why) = lane.open_pair(&channel.pair, (channel.own, other), &route, incarnation, config) {
            channel.retry_ns = after(began_ns);
            log::debug!(target: crate::base::targets::NETWORK, "rank {rank}, NIC {nic}: not yet open again: {why}");
            return;
        }
        log::info!(target: crate::base::targets::NETWORK, "the connection to rank {rank} by NIC {nic} is open again");
        channel.resumption.opened();
        (channel.opened_ns, channel.retry_ns) = (now_ns, 0);
        channel.drained = false;
        channel.opening = next(openings);
        channel.rewind(count);
        channel.report_ns = 0;
        if channel.unsent.is_empty() {
            // Until the other side is open, what is posted from now on may wait in vain.
            channel.stalled_ns = if channel.resumption.may_post() { 0 } else { channel.stalled_ns };
            return;
        }
        match line {
            Line::Writes if !waiting.contains(&(rank, nic)) => waiting.push((rank, nic)),
            Line::Messages if !mute.contains(&rank) => mute.push(rank),
            _ => {}
        }
    }

    /// Fails the writes that wait for a connection that was broken for too long. Messages wait on: they are lost only
    /// with their peer, and notices among them tell it of regions that are gone.
    pub(super) fn give_up(&mut self, (rank, nic, line): (Rank, usize, Line), now_ns: u64) {
        let VerbsEndpoint { peers, lanes, pending, .. } = self;
        let Some(channel) = peers.get_mut(&rank).and_then(|peer| peer.channel(nic, line)) else { return };
        if !channel.lost {
            channel.stalled_ns = now_ns.max(1);
        }
        if line == Line::Messages {
            return;
        }
        channel.offence = None;
        let failure = channel.cause.unwrap_or_else(|| Reason::Unreachable.into());
        // While it is open, what is posted is the device's to end.
        let posted = if channel.resumption.is_open() { 0 } else { channel.posted.len() };
        channel.given_up += posted as u64;
        let given_up = posted + channel.unsent.len();
        for number in channel.posted.drain(..posted).chain(channel.unsent.drain(..)) {
            if let Some(flight) = lanes.get_mut(nic).and_then(|lane| lane.writes.end(number)) {
                pending.push_back(Pending { nic, flight, outcome: Outcome::Failed(failure) });
            }
        }
        if given_up > 0 {
            log::warn!(target: crate::base::targets::NETWORK, "rank {rank} does not answer by NIC {nic}: {given_up} writes fail");
        }
    }

    /// Reads what the devices report.
    ///
    /// # Errors
    /// `Transport` if a device or queue is broken.
    pub(super) fn read_events(&mut self) -> Result<()> {
        for nic in 0..self.lanes.len() {
            while let Some(reported) = self.lanes.get(nic).and_then(|lane| lane.device.event()) {
                let Some(lane) = self.lanes.get_mut(nic) else { break };
                match reported {
                    Reported::Broken(number) if number == lane.datagrams() => lane.is_mute = true,
                    Reported::Broken(number) => {
                        if let Some((rank, line)) = lane.owner(number) {
                            self.break_connection(rank, nic, line);
                        }
                    }
                    Reported::LastReceive(number) => {
                        if let Some((rank, line)) = lane.owner(number)
                            && let Some(channel) = self.channel(rank, nic, line)
                        {
                            channel.drain_reported();
                        }
                    }
                    Reported::Port => {
                        lane.port_changed();
                        log::info!(target: crate::base::targets::NETWORK, "the port of {} changed", lane.device.name);
                    }
                    Reported::Fatal(event) => {
                        let what = format!("device {} reports event {event}, behind which it loses", lane.device.name);
                        return Err(Error::transport(what, "open another endpoint").ending());
                    }
                    Reported::Other => {}
                }
            }
        }
        Ok(())
    }
}

/// Breaks a connection off.
pub(super) fn break_off(
    lane: &mut Lane,
    channel: &mut Channel,
    unwell: &mut Vec<(Rank, usize, Line)>,
    at: (Rank, usize, Line),
    now: (u64, &VerbsConfig),
) {
    if channel.other.is_some() && channel.resumption.is_open() {
        channel.resumption.close();
        shut(lane, channel, unwell, at, now);
    }
}

/// Closes the queue pair of a connection that is to be closed.
pub(super) fn shut(
    lane: &mut Lane,
    channel: &mut Channel,
    unwell: &mut Vec<(Rank, usize, Line)>,
    at: (Rank, usize, Line),
    (now_ns, config): (u64, &VerbsConfig),
) {
    if let Err(code) = lane.break_pair(&channel.pair) {
        log::warn!(target: crate::base::targets::NETWORK, "a queue pair is not closed: error {code}");
    }
    channel.counted_ns = now_ns.saturating_add(COUNTED_NS);
    channel.stall(now_ns, config);
    // One that breaks as soon as it is open is not opened with every poll.
    if now_ns.saturating_sub(channel.opened_ns) < RETRY_NS {
        channel.retry_ns = now_ns.saturating_add(RETRY_NS);
    }
    if !unwell.contains(&at) {
        unwell.push(at);
    }
}

/// The next number of an opening.
pub(super) fn next(openings: &mut u32) -> u32 {
    *openings = openings.wrapping_add(1) & OPENINGS;
    *openings
}

/// When to try again what entered the kernel and may have slept there: most of the time is everybody else's.
fn after(began_ns: u64) -> u64 {
    let now_ns = coarse_now_ns();
    let took_ns = now_ns.saturating_sub(began_ns);
    now_ns.saturating_add(RETRY_NS.saturating_add(took_ns.saturating_mul(20)))
}
