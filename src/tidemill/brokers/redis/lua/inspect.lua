-- Inspection of jobs and queues; writes nothing.
--
-- ARGV  5 verb
--       get     then ids
--       find    6 seq to go on below, or '', 7 number of jobs, 8 states wanted as digits, or '' for all,
--               9 beginning of the ids, 10 ending of the ids
--       stats   6 queue to go on behind, 7 number of queues
--       limits
--       partitions   6 limit by name, 7 partition to go on behind or '', 8 number of partitions
--       held    6 id
--       ahead   6 id, 7 most
--       head    6 queue, 7 state, 8 number of jobs, 9 '' or the place that the last call returned
--       schedules  names        schedules_after  6 name, 7 number of schedules
-- A job is shown as {id, record, envelope, name of its worker, progress, log, result, counts of B:wait or ''}, or 0
--       when there is none. The jobs of find and head have no log, no result, and an empty body in the envelope.
-- Returns for get a job for each id; for find {seq to go on below or '', {jobs}}; for head {place to go on from or '',
--       jobs}; for stats {queue, its row, envelope of its oldest ready job or '', …}; for
--       limits {q or n, name, settings, declared, running, failures, microseconds until it opens (-1: not by time),
--       1 if set by hand, …}; for partitions {number of running jobs, number of keys in use, partition to go on behind
--       or ''}; for held 0, or {name, key, 1 if it is the queue's limit, until, running, settings, 1 if the breaker
--       is open}; for ahead the number of jobs before the job, 7 most; for schedules a record or 0 for each name; for schedules_after {name, record, …}.

local worker_names = {} -- owner → name, kept for one call

local function name_of(owner)
  if not worker_names[owner] then worker_names[owner] = call('HGET', B .. ':o:' .. owner, 'name') or '' end
  return worker_names[owner]
end

local function shown(id, data, listed)
  if not data then return 0 end
  local envelope = call('HGET', K_ENV, id)
  if listed then envelope = Backoff.without_body(envelope) end
  local worker, progress, lines, result = '', '', {}, ''
  local state, flags = byte(data, 9, 10)
  if state == RUNNING then worker = name_of(parse_job(id, data).owner) end
  if flagged(flags, NOTED) then
    progress = call('GET', B .. ':p:' .. id) or ''
    if not listed then lines = call('LRANGE', B .. ':g:' .. id, 0, -1) end
  end
  if flagged(flags, RESULT) and not listed then result = call('HGET', K_RESULT, id) end
  local wait = flagged(flags, LINKED) and call('HGET', K_WAIT, id) or ''
  return {id, data, envelope, worker, progress, lines, result, wait}
end

-- Ids of leased jobs, newest first, so that a search for running jobs does not walk over all other jobs.
local function leased_ids(below, most)
  local ids, seqs, limit = {}, {}, tonumber(below) or math.huge
  for _, owner in ipairs(call('ZRANGE', B .. ':beat', 0, -1)) do
    local held = call('HVALS', B .. ':l:' .. owner)
    for i, data in ipairs(fetch_all(K_JOB, held)) do
      local number = data and unpk('>I8', data)
      if number and number < limit and not seqs[held[i]] then
        seqs[held[i]] = number
        ids[#ids + 1] = held[i]
      end
    end
  end
  table.sort(ids, function(a, b) return seqs[a] > seqs[b] end)
  for i = #ids, most + 1, -1 do ids[i] = nil end
  return ids
end

local function find(below, most, states, first, last)
  local from = below == '' and '+inf' or '(' .. below
  local all = states == tostring(RUNNING) and leased_ids(below, most)
    or call('ZREVRANGEBYSCORE', K_ALL, from, '-inf', 'LIMIT', 0, most)
  local ids = {}
  for _, id in ipairs(all) do
    if sub(id, 1, #first) == first and (last == '' or sub(id, -#last) == last) then ids[#ids + 1] = id end
  end
  local found, datas = {}, fetch_all(K_JOB, ids)
  for i, id in ipairs(ids) do
    if states == '' or string.find(states, string.char(48 + byte(datas[i], 9)), 1, true) then
      found[#found + 1] = shown(id, datas[i], true)
    end
  end
  local on = #all == most and string.format('%.0f', (unpk('>I8', call('HGET', K_JOB, all[#all])))) or ''
  return {on, found}
end

-- The oldest job of a table is the first job of its rank. All looks of a call share 1000 steps; when these are used up,
-- only the first rank of each line of ready jobs is still seen.
local function stats(behind, most)
  local all, from, oldest, steps = {}, behind == '' and '-' or '(' .. behind, {}, 1000
  local queues = call('ZRANGEBYLEX', B .. ':queues', from, '+', 'LIMIT', 0, most)
  local function look(queue, key, least)
    local above = '-inf'
    for _ = 1, math.max(least, math.min(steps, 256)) do
      local first = call('ZRANGEBYSCORE', key, above, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
      steps = steps - 1
      if not first[1] then break end
      if not oldest[queue] or number_in(first[1]) < number_in(oldest[queue]) then oldest[queue] = first[1] end
      above = '(' .. first[2]
    end
  end
  for _, queue in ipairs(queues) do
    for _, kind in ipairs(KINDS) do look(queue, B .. ':r:' .. kind .. queue, 1) end
  end
  for _, queue in ipairs(queues) do
    for _, kind in ipairs(KINDS) do
      local line = kind .. queue
      local parked = steps > 0 and call('SSCAN', B .. ':parked:' .. line, '0', 'COUNT', 256)[2] or {}
      for _, partition in ipairs(parked) do look(queue, Partitions.park_of(line, partition), 0) end
    end
  end
  for _, queue in ipairs(queues) do
    all[#all + 1] = queue
    local row = call('HGETALL', B .. ':q:' .. queue)
    row[#row + 1] = 'ready'
    row[#row + 1] = tostring(ready_of(queue))
    all[#all + 1] = row
    all[#all + 1] = oldest[queue] and call('HGET', K_ENV, sub(oldest[queue], 9)) or ''
  end
  return all
end

local function until_(when) return when == Limiter.NEVER and -1 or when > 0 and when - now or 0 end

local function limits_shown()
  local all = {}
  local function show(...)
    for _, fact in ipairs({...}) do all[#all + 1] = fact end
  end
  local fields = call('HGETALL', B .. ':terms')
  for i = 1, #fields, 2 do
    local kind, name = sub(fields[i], 1, 1), sub(fields[i], 2)
    local known = Settings.known(kind, name)
    local packed, declared, by_hand = known.packed, known.declared, known.by_hand and 1 or 0
    if kind == 'q' then
      local row = find_row(name)
      show(kind, name, packed, declared, row.base, row.limiter.failures, until_(Limiter.opens(row.settings, row.limiter, row.base, 1)), by_hand)
    else
      show(kind, name, packed, declared, 0, 0, 0, by_hand)
    end
  end
  return all
end

local function partitions_shown(limit, behind, most)
  local from = behind == '' and '[' .. limit .. '\0' or '(' .. behind
  local names = call('ZRANGEBYLEX', B .. ':lanes', from, '(' .. limit .. '\1', 'LIMIT', 0, most)
  for i, data in ipairs(fetch_all(B .. ':lane', names)) do limits.partitions[names[i]] = data or nil end
  local running, keys = 0, 0
  for _, name in ipairs(names) do
    local partition = Partitions.of(name)
    running = running + partition.running
    if next(partition.lines) or partition.running > 0 or Limiter.clear_at(Settings.of_partition(name), partition.limiter) > now then keys = keys + 1 end
  end
  return {running, keys, #names == most and names[most] or ''}
end

local function ready_job(id)
  local j = load_job(id)
  if j and j.state == READY then return j end
end

local function held(id)
  local j, own = ready_job(id), 0
  if not j then return 0 end
  if j.partition then
    local partition, name, key = Partitions.of(j.partition), Partitions.split(j.partition)
    local when = Limiter.opens(Settings.of_partition(j.partition), partition.limiter, partition.running, j.cost)
    own = {name, key, 0, until_(when), partition.running, Settings.known('n', name).packed, 0}
    if when > 0 then return own end
  end
  local row = find_row(j.queue)
  if not row.limiter then return own end
  local when = Limiter.opens(row.settings, row.limiter, row.base, 1)
  if when == 0 and own ~= 0 then return own end
  local broken = row.settings.breaker and row.limiter.failures >= row.settings.breaker
  return {j.queue, '', 1, until_(when), row.base, Settings.known('q', j.queue).packed, broken and 1 or 0}
end

local function ahead(id, most)
  local j = ready_job(id)
  if not j then return 0 end
  local line = line_of(j)
  local key = j.partition and Partitions.park_of(line, j.partition) or B .. ':r:' .. line
  return math.min(call('ZRANK', key, pack('>I8', j.seq) .. id) or 0, most)
end

-- The first jobs in the lines of a queue, in order.
local function ready_in(queue, most)
  local entries, ids = {}, {}
  for _, kind in ipairs(KINDS) do
    local found = call('ZRANGE', B .. ':r:' .. kind .. queue, 0, most - 1, 'WITHSCORES')
    for i = 1, #found, 2 do entries[#entries + 1] = {tonumber(found[i + 1]), number_in(found[i]), sub(found[i], 9)} end
  end
  table.sort(entries, function(a, b) return a[1] < b[1] or a[1] == b[1] and a[2] < b[2] end)
  for i = 1, math.min(most, #entries) do ids[i] = entries[i][3] end
  return ids
end

-- Find jobs of a queue in a state among the next entries of some sorted sets; also return the place to go on from.
local function next_in(keys, prefix, queue, state, most, place)
  local which, from = string.match(place, '(%d+) (%d+)')
  which, from = tonumber(which or 1), tonumber(from or 0)
  local found, ids, mine = call('ZRANGE', keys[which], from, from + CHUNK - 1), {}, {}
  for _, member in ipairs(found) do
    if sub(member, 1, #prefix) == prefix then ids[#ids + 1] = sub(member, #prefix + 1) end
  end
  for i, data in ipairs(fetch_all(K_JOB, ids)) do
    local is_mine = data and byte(data, 9) == state and sub(data, 32, 31 + byte(data, 31)) == queue
    if is_mine and #mine < most then mine[#mine + 1] = ids[i] end
  end
  if #found == CHUNK then return mine, which .. ' ' .. from + CHUNK end
  return mine, which < #keys and which + 1 .. ' 0' or ''
end

local function head(queue, state, most, place)
  local ids, all, on = nil, {}, ''
  if state == READY then
    ids = ready_in(queue, most)
  elseif state == SCHEDULED then
    ids, on = next_in({K_DUE}, 'j', queue, state, most, place)
  else
    ids, on = next_in({B .. ':fin:2', B .. ':fin:3'}, '', queue, state, most, place)
  end
  all[1] = on
  for i, id in ipairs(ids) do all[i + 1] = shown(id, call('HGET', K_JOB, id), true) end
  return all
end

local function schedules_named()
  local wanted = {}
  for i = 6, #ARGV do wanted[#wanted + 1] = ARGV[i] end
  local records = fetch_all(B .. ':schedule', wanted)
  for i, record in ipairs(records) do records[i] = record or 0 end
  return records
end

local function schedules_after(name, most)
  local page = {}
  local found = call('ZRANGEBYLEX', B .. ':schedules', name == '' and '-' or '(' .. name, '+', 'LIMIT', 0, most)
  for i, record in ipairs(fetch_all(B .. ':schedule', found)) do
    page[2 * i - 1], page[2 * i] = found[i], record
  end
  return page
end

local function get()
  local found = {}
  for i = 6, #ARGV do found[#found + 1] = shown(ARGV[i], call('HGET', K_JOB, ARGV[i])) end
  return found
end

local INSPECT = {
  get = get,
  head = function() return head(ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]) end,
  limits = limits_shown,
  partitions = function() return partitions_shown(ARGV[6], ARGV[7], tonumber(ARGV[8])) end,
  held = function() return held(ARGV[6]) end,
  ahead = function() return ahead(ARGV[6], tonumber(ARGV[7])) end,
  find = function() return find(ARGV[6], tonumber(ARGV[7]), ARGV[8], ARGV[9], ARGV[10]) end,
  stats = function() return stats(ARGV[6], ARGV[7]) end,
  schedules = schedules_named,
  schedules_after = function() return schedules_after(ARGV[6], ARGV[7]) end,
}

function Verbs.inspect()
  worker_names = {}
  return INSPECT[ARGV[5]]()
end
