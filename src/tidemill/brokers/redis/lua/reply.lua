-- The reply to an exchange: leases with their inputs, and the reply as a whole.

local show_lease, show_inputs, earlier_reply, reply

do

function show_lease(x, j, token, ttr, envelope, leased)
  local leases = x.leases
  leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, j.attempt + 1, j.losses, j.rank, j.turn or j.seq,
    j.timeout, leased or now, ttr)
  leases[#leases + 1] = envelope
end

-- Give the last lease its inputs: the results of the earlier jobs that its job asks for.
function show_inputs(x, id)
  local wish = flows.links[id] or links_of(id)
  if type(wish) == 'string' and unpk('>I4', wish, LINKS_WAITS + 1) == 0 then return end -- the hot path
  local names, shown = links_of(id).inputs, {}
  if #names == 0 then return end
  read_ahead(names)
  local found = fetch_all(B .. ':result', names)
  for i, name in ipairs(names) do
    local j = load_job(name)
    shown[#shown + 1] = name
    shown[#shown + 1] = j and j.state or ''
    shown[#shown + 1] = j and (results[name] or found[i]) or ''
    shown[#shown + 1] = j and j.error or ''
  end
  local inputs = x.inputs
  inputs[#inputs + 1] = #x.leases / 2 - 1
  inputs[#inputs + 1] = shown
end

-- The reply to a repeated step: as before, with the leases of that step that the owner still has.
local function replay(x)
  local settled, touched, first_token, last_token, commands = unpack(cmsgpack.unpack(x.last_reply))
  for _, lease in ipairs(leases_of(x.owner)) do
    local j = load_job(lease[2])
    if lease[1] >= first_token and lease[1] <= last_token and j.token == lease[1] then
      local ttr = j.deadline > 0 and math.max(0, j.deadline - now) / 1000000 or 0
      show_lease(x, j, j.token, ttr, call('HGET', K_ENV, j.id), j.leased)
      if flagged(j.flags, LINKED) then show_inputs(x, j.id) end
    end
  end
  return {settled, touched, x.leases, commands, 0, x.inputs, {}, '', 1, {}, 0}
end

-- The earlier reply to a repeated step, or {'late', serial} for a step that comes too late; nil for a new step.
function earlier_reply(x)
  if x.on_behalf then return nil end
  if x.last_serial > x.serial then return {'late', text_of(x.last_serial)} end -- nobody waits for it any more
  if x.last_serial == x.serial then return replay(x) end
  return nil
end

-- Keep the reply for a repetition of this step.
local function keep_reply(x)
  x.commands = call('LPOP', B .. ':c:' .. x.owner, 100) or {}
  if x.moved and x.wanted > 0 then table.insert(x.commands, 1, pack('>I8', 0) .. 'quiet') end
  x.settled, x.touched = table.concat(x.settled), table.concat(x.touched)
  call('HSET', x.key, 'serial', x.serial, 'last', x.last_queue, 'handed', '', 'answer',
    cmsgpack.pack({x.settled, x.touched, x.first_token, x.last_token, x.commands}))
  Limits.sync()
end

-- Hand due schedules out to an owner that handles schedules, and note the next due time that it is told.
local function show_schedules(x)
  x.schedules = {}
  local most = tonumber(ARGV[9])
  if most == 0 or x.moved then return end
  x.schedules = hand_out(most)
  local firing = next_firing()
  call('ZADD', B .. ':fires', firing < 0 and '+inf' or now + firing, x.owner)
  if firing >= 0 and (x.due < 0 or firing < x.due) then x.due = firing end
end

-- List the owner as asleep if it has room for more jobs, else take it off that list.
local function note_sleep(x)
  if not x.has_want then return end
  if x.sleeps == 0 or #x.leases / 2 >= x.wanted then
    if call('ZREM', K_ASLEEP, x.owner) == 1 then due_moved = true end -- it may have been the next to look at B:due
    return
  end
  call('ZADD', K_ASLEEP, x.due < 0 and '+inf' or now + x.due, x.owner)
  call('HSET', x.key, 'slept', now)
  for _, kind in ipairs(x.kinds) do
    if #x.queues == 0 then call('ZADD', B .. ':z:' .. kind, now, x.owner) end
    for _, queue in ipairs(x.queues) do call('ZADD', B .. ':z:' .. kind .. queue, now, x.owner) end
  end
  if flagged(x.kind_bits, 8) then x.turn = HandOff.offer(x, ARGV[7]) end
end

-- The whole reply; the owner may sleep from now on.
function reply(x)
  keep_reply(x)
  x.due = next_due()
  show_schedules(x)
  note_sleep(x)
  finish_step()
  local behind = x.last_serial < x.serial - 1 and 1 or 0
  return {x.settled, x.touched, x.leases, x.commands, x.due, x.inputs, x.schedules, x.roster, behind, x.strays, x.turn}
end

end
