-- Note, settle, touch and lease, in that order, as one step.
--
-- ARGV  5 owner, 6 serial and epoch, packed, 7 microseconds of its owner lease
--       8 the want, or empty: count, mode (0 fair, 1 strict, 2 merged), kinds (1 tasks, 2 messages, 4 lost ones), sleep
--       9 how many schedules it would see to, 10 queues of the want, then these
--       n verdicts: (token, outcome, delay, started, ended, hold, sizes of error and traceback, followers)
--         with error, traceback and result behind; then its followers, four arguments each
--       n touches: (token, seconds)
--       n notes: (token, done, total, time) with the line behind
-- Returns 0 when the owner is not on the list (or is there anew); {'moved', where}; else settled and touched ('0' and '1'), leases (fixed
--       part, envelope, …), commands, microseconds until something is due (-1 never), and until the
--       next of the other owners is to be given up; which leases have inputs, and those (id, state, result,
--       error, …); schedules (name, record, …); how the list of owners stands.

local owner, serial, epoch = ARGV[5], unpk('>I8I2c0', ARGV[6])
local K_OWNER, K_LEASES = B .. ':o:' .. owner, B .. ':l:' .. owner
local me = call('HMGET', K_OWNER, 'name', 'kind', 'serial', 'answer', 'last', 'epoch', 'roster')
if not me[1] or me[6] ~= epoch then return 0 end
local worker, consumer, last_queue = me[1], me[2] == 'consumer', me[5] or ''
call('ZADD', B .. ':beat', now + ARGV[7], owner)

local leases, inputs, IS_RUNNING = {}, {}, string.char(RUNNING)
local first_token, last_token = 0, -1

local function show_lease(j, token, ttr, envelope)
  leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, j.attempt + 1, j.losses, j.rank, j.turn or j.seq,
    j.timeout, now, ttr)
  leases[#leases + 1] = envelope
end

-- Give the last lease the ends of the jobs before it that it asks for.
local function show_inputs(id)
  local wish = flows.links[id] or links_of(id)
  if type(wish) == 'string' and unpk('>I4', wish, LINKS_WAITS + 1) == 0 then return end -- the hot path
  local names, shown = links_of(id).inputs, {}
  if #names == 0 then return end
  read_ahead(names)
  local ends = fetch_all(K_RESULT, names)
  for i, name in ipairs(names) do
    local j = load_job(name)
    shown[#shown + 1] = name
    shown[#shown + 1] = j and j.state or ''
    shown[#shown + 1] = j and (results[name] or ends[i]) or ''
    shown[#shown + 1] = j and j.error or ''
  end
  inputs[#inputs + 1] = #leases / 2 - 1
  inputs[#inputs + 1] = shown
end

-- When the next of the others is to be given up.
local function next_death()
  local beats = call('ZRANGE', B .. ':beat', 0, 1, 'WITHSCORES')
  local at = beats[1] == owner and beats[4] or beats[2]
  return at and math.max(0, at - now) or -1
end

local function replay(answer)
  for _, lease in ipairs(leases_of(owner)) do
    local j = load_job(lease[2])
    if lease[1] >= answer[3] and lease[1] <= answer[4] and j.token == lease[1] then
      local ttr = j.deadline > 0 and math.max(0, j.deadline - now) / 1000000 or 0
      show_lease(j, j.token, ttr, call('HGET', K_ENV, j.id))
      if flagged(j.flags, LINKED) then show_inputs(j.id) end
    end
  end
  return {answer[1], answer[2], leases, answer[5], 0, next_death(), inputs, {}, ''}
end

if tonumber(me[3]) >= serial then return replay(cmsgpack.unpack(me[4])) end

local wanted, mode, kind_bits, sleeps = 0, 0, 0, 0
if ARGV[8] ~= '' then wanted, mode, kind_bits, sleeps = unpk('>I4BBB', ARGV[8]) end
local moved = departure()
if moved and consumer and wanted > 0 then return moved end

-- -- arguments -------------------------------------------------------------------------------------

local at = 10
local queues, verdicts, touches, notes = {}, {}, {}, {}

local function read_some()
  local many = tonumber(ARGV[at])
  local first = at + 1
  at = first + many
  return first, at - 1
end

do
  local first, last = read_some()
  for i = first, last do queues[#queues + 1] = ARGV[i] end
  local tokens = {}
  local many = tonumber(ARGV[at])
  at = at + 1
  for _ = 1, many do
    local data = ARGV[at]
    local token, outcome, delay, started, ended, hold, e, t, followers, from = unpk('>I8BdddBI4I4I4', data)
    verdicts[#verdicts + 1] = {
      token = token, outcome = outcome, delay = delay, started = started, ended = ended, hold = hold == 1,
      error = sub(data, from, from + e - 1), traceback = sub(data, from + e, from + e + t - 1),
      result = sub(data, from + e + t), followers = followers, first = at + 1,
    }
    at = at + 1 + 4 * followers
    tokens[#tokens + 1] = token
  end
  first, last = read_some()
  for i = first, last do
    local token, seconds = unpk('>I8d', ARGV[i])
    touches[#touches + 1] = {token, seconds}
    tokens[#tokens + 1] = token
  end
  first, last = read_some()
  for i = first, last do
    local token, done, total, time, from = unpk('>I8ddd', ARGV[i])
    notes[#notes + 1] = {token, done, total, time, sub(ARGV[i], from)}
    tokens[#tokens + 1] = token
  end
  notes.tokens = tokens
end

-- -- what it says ----------------------------------------------------------------------------------

local held = {} -- token → id, as the list of leases has it

-- Those jobs of some, just read, that hang together with others.
local function linked_of(ids)
  local linked = {}
  for _, id in ipairs(ids) do
    local data = jobs[id]
    if type(data) == 'string' and byte(data, 10) >= LINKED and flagged(byte(data, 10), LINKED) then
      linked[#linked + 1] = id
    end
  end
  return linked
end

local function mine(token)
  local j = held[token] and load_job(held[token])
  return j and j.state == RUNNING and j.token == token and j.owner == owner and j or nil
end

local function note(token, done, total, time, line)
  local j = mine(token)
  if not j then return end
  if done >= 0 then call('SET', B .. ':p:' .. j.id, pack('>dd', done, total)) end
  if line ~= '' then log(j.id, line, time) end
  if not flagged(j.flags, NOTED) then
    j.flags = j.flags + NOTED
    save(j)
  end
end

local function touch(token, seconds)
  local j = mine(token)
  if not j then return '0' end
  if j.deadline > 0 then
    local ttr = seconds > 0 and seconds or (j.ttr > 0 and j.ttr or 60)
    j.deadline = now + math.floor(ttr * 1000000)
    add_due(j.deadline, 'l' .. j.id)
    save(j)
  end
  return '1'
end

local more = come_due()
local settled, touched = {}, {}
do
  local tokens, texts, ids = notes.tokens, {}, {}
  for i, token in ipairs(tokens) do texts[i] = text_of(token) end
  for i, id in ipairs(fetch_all(K_LEASES, texts)) do
    if id then
      held[tokens[i]] = id
      ids[#ids + 1] = id
    end
  end
  read_ahead(ids)
  read_links_ahead(linked_of(ids))
end
for _, n in ipairs(notes) do note(unpack(n)) end
for i, v in ipairs(verdicts) do
  local id = held[v.token]
  local data = id and jobs[id]
  if type(data) == 'string' and succeed_plainly(id, data, owner, worker, v) then
    settled[i] = '1'
  else
    local j = mine(v.token)
    settled[i] = j and '1' or '0'
    if j then
      close_attempt(j, worker, v)
      follow(v.first, v.followers)
    end
  end
end
for i, t in ipairs(touches) do touched[i] = touch(t[1], t[2]) end

-- -- what it gets ----------------------------------------------------------------------------------

-- Lease a job that was taken from its line; false when it had expired, and has ended.
local function lend(j, token, envelope, lent)
  if j.lane then Lanes.taken(j) end
  if j.expires > 0 and j.expires <= now then
    finish(j, EXPIRED, TOO_LATE)
    return false
  end
  if j.message and j.ttr == 0 then -- at most once: gone when taken
    show_lease(j, token, 0, envelope)
    if j.lane then Lanes.start(j, token, false) end
    if flagged(j.flags, LINKED) then show_inputs(j.id) end
    finish(j, SUCCEEDED, '')
    return true
  end
  local ttr = consumer and (j.ttr > 0 and j.ttr or 60) or 0
  j.state, j.token, j.leased, j.owner, j.deadline = RUNNING, token, now, owner, 0
  if consumer then
    j.deadline = now + math.floor(ttr * 1000000)
    add_due(j.deadline, 'l' .. j.id)
  end
  lent[#lent + 1] = text_of(token)
  lent[#lent + 1] = j.id
  save(j)
  show_lease(j, token, ttr, envelope)
  if j.lane then Lanes.start(j, token, true) end
  if flagged(j.flags, LINKED) then show_inputs(j.id) end
  return true
end

local function draw_tokens(many)
  local token = call('INCRBY', B .. ':seq', many) - many
  if first_token == 0 then first_token = token + 1 end
  last_token = token + many
  return token
end

-- Where lanes are, one after the other: the next of a lane may come before what else is there.
local function take_in_turn(line, many)
  local key, token = B .. ':r:' .. line, draw_tokens(many)
  local lent, places, ids, empty = {}, {}, {}, false
  while many > 0 do
    local member = call('ZPOPMIN', key, 1)[1]
    if not member then
      call('ZREM', K_LINES, line)
      row_of(sub(line, 2)).listed = nil
      empty = true
      break
    end
    local id = sub(member, 9)
    local j = load_job(id)
    j.turn = unpk('>I8', member) -- where it stood
    if lend(j, token + 1, '', lent) then
      token, many = token + 1, many - 1
      places[#places + 1], ids[#ids + 1] = #leases, id
    end
    if j.lane then Lanes.follow(j.lane) end
    flow()
    Limits.sync_lanes()
    flush_lines()
  end
  for i, envelope in ipairs(fetch_all(K_ENV, ids)) do leases[places[i]] = envelope end
  count(sub(line, 2), 'running', #lent / 2)
  call_all('HSET', K_LEASES, lent)
  return empty
end

-- The hot path of leasing.
local function take_at_once(line, many)
  local key = B .. ':r:' .. line
  while many > 0 do
    local ready = call('ZPOPMIN', key, many)
    if #ready == 0 then
      call('ZREM', K_LINES, line)
      row_of(sub(line, 2)).listed = nil
      return true
    end
    local ids = {}
    for i = 1, #ready, 2 do ids[#ids + 1] = sub(ready[i], 9) end
    read_ahead(ids)
    read_links_ahead(linked_of(ids))
    local envelopes = fetch_all(K_ENV, ids)
    local token, lent = draw_tokens(#ids), {}
    for i, id in ipairs(ids) do
      local data = jobs[id]
      local bits = type(data) == 'string' and byte(data, 10)
      if (bits == 0 or bits == LINKED) and not consumer then -- neither times nor past: its record only grows
        local number, _, _, attempt, losses, _, _, rank = unpk('>I8BBI4I4I4I4I4', data)
        token, many = token + 1, many - 1
        jobs[id] = sub(data, 1, 8) .. IS_RUNNING .. sub(data, 10) .. pack('>I8I8I8I2c0', token, now, 0, #owner, owner)
        touch_id(id)
        lent[#lent + 1] = text_of(token)
        lent[#lent + 1] = id
        leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, attempt + 1, losses, rank, number, 0, now, 0)
        leases[#leases + 1] = envelopes[i]
        if bits == LINKED then show_inputs(id) end
      elseif lend(load_job(id), token + 1, envelopes[i], lent) then
        token, many = token + 1, many - 1
      end
    end
    count(sub(line, 2), 'running', #lent / 2)
    call_all('HSET', K_LEASES, lent)
    flow()
    Limits.sync_lanes()
    flush_lines() -- an end may have made a successor ready
  end
  return false
end

-- Lease the first jobs of one line; true when it has no more, or its limit lets no more start.
local function take_line(line, many)
  local row, before = find_row(sub(line, 2)), #leases
  if row and row.gate then
    many = Gates.room(row, many)
    if many <= 0 then return true end
  end
  local in_turn = row and row.laned and call('EXISTS', B .. ':parked:' .. line) == 1
  local empty = (in_turn and take_in_turn or take_at_once)(line, many)
  if row and row.gate and #leases > before then Gates.take(row, (#leases - before) / 2) end
  return empty
end

-- Of several lines, the one whose first job comes before those of the others.
local function best_line(lines)
  local best, best_rank, best_member
  for _, line in ipairs(lines) do
    local head = call('ZRANGE', B .. ':r:' .. line, 0, 0, 'WITHSCORES')
    if head[1] then
      local rank = tonumber(head[2])
      if not best or rank < best_rank or rank == best_rank and head[1] < best_member then
        best, best_rank, best_member = line, rank, head[1]
      end
    end
  end
  return best
end

-- Take from several lines as if they were one.
local function take_lines(lines, many)
  if #lines == 1 then return take_line(lines[1], many) end
  local full = #leases / 2 + many
  while #leases / 2 < full do
    local open = {}
    for _, line in ipairs(lines) do
      if Gates.is_open(sub(line, 2)) then open[#open + 1] = line end
    end
    local line = best_line(open)
    if not line then return true end
    take_line(line, 1)
  end
  return false
end

-- Every queue its share, until the hand is full or nothing is left.
local function take_fairly(groups, many)
  while #groups > 0 and #leases / 2 < many do
    local share, rest = math.max(1, math.floor((many - #leases / 2) / #groups)), {}
    for _, group in ipairs(groups) do
      local few = math.min(share, many - #leases / 2)
      if few <= 0 then return end
      local before = #leases
      local empty = take_lines(group, few)
      if #leases > before then last_queue = sub(group[1], 2) end
      if not empty then rest[#rest + 1] = group end
    end
    groups = rest
  end
end

local function lines_of(kind)
  return call('ZRANGEBYLEX', K_LINES, '[' .. kind, '(' .. string.char(byte(kind) + 1))
end

-- The first task that is to run alone, of the queues wanted; nearly always there is none.
local function take_lost()
  local lost = lines_of('L')
  if #lost == 0 then return end
  local lines, named = {}, {}
  for _, queue in ipairs(queues) do named[queue] = true end
  for _, line in ipairs(lost) do
    if #queues == 0 or named[sub(line, 2)] then lines[#lines + 1] = line end
  end
  if #lines > 0 then take_lines(lines, 1) end
end

-- By queue: its lines that may be served; those of the queues named, or all that have something.
local function wanted_lines(kinds)
  local groups = {}
  if #queues > 0 then
    for _, queue in ipairs(queues) do
      local row = find_row(queue)
      if row and not row.paused then
        local group = {}
        for _, kind in ipairs(kinds) do group[#group + 1] = kind .. queue end
        groups[#groups + 1] = group
      end
    end
    return groups
  end
  local by_queue, names = {}, {}
  for _, kind in ipairs(kinds) do
    for _, line in ipairs(lines_of(kind)) do
      local queue = sub(line, 2)
      if not by_queue[queue] then
        by_queue[queue] = {}
        names[#names + 1] = queue
      end
      table.insert(by_queue[queue], line)
    end
  end
  table.sort(names)
  for i, queue in ipairs(names) do groups[i] = by_queue[queue] end
  return groups
end

local function after_last(groups)
  local turned = {}
  for _, later in ipairs({true, false}) do
    for _, group in ipairs(groups) do
      if (sub(group[1], 2) > last_queue) == later then turned[#turned + 1] = group end
    end
  end
  return turned
end

local function flat(groups)
  local lines = {}
  for _, group in ipairs(groups) do
    for _, line in ipairs(group) do lines[#lines + 1] = line end
  end
  return lines
end

flow()
Limits.sync()
flush() -- what was settled may be leased again, and what waited for it
local kinds, groups = {}, {}
if ARGV[8] ~= '' and not moved then
  if flagged(kind_bits, 1) then kinds[#kinds + 1] = 'T' end
  if flagged(kind_bits, 2) then kinds[#kinds + 1] = 'M' end
  if wanted > 0 and flagged(kind_bits, 4) then take_lost() end
  groups = wanted_lines(kinds)
  if flagged(kind_bits, 4) then kinds[#kinds + 1] = 'L' end
  if wanted > #leases / 2 then
    if mode == 0 then
      table.sort(groups, function(a, b) return sub(a[1], 2) < sub(b[1], 2) end)
      take_fairly(after_last(groups), wanted)
    elseif mode == 2 then
      if #groups > 0 then take_lines(flat(groups), wanted - #leases / 2) end
    else
      for _, group in ipairs(groups) do
        if #leases / 2 < wanted then take_lines(group, wanted - #leases / 2) end
      end
    end
  end
  -- The hand is full: whatever it was woken for may be left for another.
  if #leases / 2 >= wanted then
    local rest = flat(groups)
    for _, queue in ipairs(queues) do rest[#rest + 1] = 'L' .. queue end
    ring_rest(#queues > 0 and rest or nil)
  end
end
if #verdicts > 0 then prune(2 * #verdicts + 2, next(flows.links), next(limits.lanes)) end

-- -- the answer ------------------------------------------------------------------------------------

local commands = call('LPOP', B .. ':c:' .. owner, 100) or {}
if moved and wanted > 0 then table.insert(commands, 1, pack('>I8', 0) .. 'quiet') end
settled, touched = table.concat(settled), table.concat(touched)
call('HSET', K_OWNER, 'serial', serial, 'last', last_queue, 'answer',
  cmsgpack.pack({settled, touched, first_token, last_token, commands}))
Limits.sync()
local due, schedules = more and 0 or next_due(), {}
local fires = tonumber(ARGV[9])
if fires > 0 and not moved then
  schedules = hand_out(fires)
  local firing = next_firing()
  call('ZADD', B .. ':fires', firing < 0 and '+inf' or now + firing, owner)
  if firing >= 0 and (due < 0 or firing < due) then due = firing end
end
if ARGV[8] ~= '' then
  if sleeps == 1 and #leases / 2 < wanted then -- it has room for what comes next
    call('ZADD', K_ASLEEP, due < 0 and '+inf' or now + due, owner)
    for _, kind in ipairs(kinds) do
      if #queues == 0 then call('ZADD', B .. ':z:' .. kind, now, owner) end
      for _, queue in ipairs(queues) do call('ZADD', B .. ':z:' .. kind .. queue, now, owner) end
    end
  elseif call('ZREM', K_ASLEEP, owner) == 1 then
    due_moved = true -- it kept the time for others, perhaps
  end
end
finish_step()
return {settled, touched, leases, commands, due, next_death(), inputs, schedules, me[7] or ''}
