-- History: rows of numbers by period. A step appends its rows to B:counts, a list. A client sums them now and then, and
-- stores the sums in B:sums:SPAN:AT:KIND, a hash of names for each period. B:periods:SPAN:KIND is a zset of these
-- periods by time, and B:kinds a set of 'SPAN:KIND'. B:folds counts the changes of sums and the rows taken from the list.
--
-- ARGV  5 verb
--       range    6 span, 7 kind, 8 since, 9 until, 10 number of periods at most, 11 name or ''
--       added    6 number of rows at most       sums   6… span, at, kind, name of each row
--       change   6 folds that the client knows, 7 number of rows to take from the list, then span, at, kind, name, sum;
--                an empty sum deletes the row
-- Returns range {rows in the list, period, {name, sum, …}, …}; added {folds, rows}; sums {folds, sum or nil, …};
--       change 1, or 0 when the sums have changed: then nothing was done.

local prune_history

do

local K_FOLDS, K_COUNTS, K_KINDS, K_SUMS, K_PERIODS = ':folds', ':counts', ':kinds', ':sums:', ':periods:'
local KEEP = {['60'] = 172800, ['3600'] = 7776000} -- KEEP in history_rows.py

local function folds() return call('GET', B .. K_FOLDS) or '0' end

local function period_key(span, at, kind) return B .. K_SUMS .. span .. ':' .. at .. ':' .. kind end

local function range(span, kind, since, till, most, name)
  local told = {call('LRANGE', B .. K_COUNTS, 0, -1)}
  local periods = call('ZRANGEBYSCORE', B .. K_PERIODS .. span .. ':' .. kind, since, '(' .. till, 'LIMIT', 0, most)
  for _, at in ipairs(periods) do
    local key = period_key(span, at, kind)
    told[#told + 1] = at
    if name == '' then
      told[#told + 1] = call('HGETALL', key)
    else
      local sum = call('HGET', key, name)
      told[#told + 1] = sum and {name, sum} or {}
    end
  end
  return told
end

local function sums()
  local told = {folds()}
  for i = 6, #ARGV, 4 do told[#told + 1] = call('HGET', period_key(ARGV[i], ARGV[i + 1], ARGV[i + 2]), ARGV[i + 3]) end
  return told
end

-- Remove a deleted period from the lists of periods.
local function leave_lists(span, kind, at)
  local index = B .. K_PERIODS .. span .. ':' .. kind
  call('ZREM', index, at)
  if call('EXISTS', index) == 0 then call('SREM', B .. K_KINDS, span .. ':' .. kind) end
end

local function drop_sum(span, at, kind, name)
  local key = period_key(span, at, kind)
  call('HDEL', key, name)
  if call('EXISTS', key) == 0 then leave_lists(span, kind, at) end
end

local function change()
  if folds() ~= ARGV[6] then return 0 end
  call('INCR', B .. K_FOLDS)
  call('LTRIM', B .. K_COUNTS, ARGV[7], -1)
  for i = 8, #ARGV, 5 do
    local span, at, kind, name, sum = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
    if sum == '' then
      drop_sum(span, at, kind, name)
    else
      call('HSET', period_key(span, at, kind), name, sum)
      call('ZADD', B .. K_PERIODS .. span .. ':' .. kind, at, at)
      call('SADD', B .. K_KINDS, span .. ':' .. kind)
    end
  end
  return 1
end

-- Delete periods whose time is over, up to `most`; returns how many.
function prune_history(most)
  local many = 0
  for _, of in ipairs(call('SMEMBERS', B .. K_KINDS)) do
    local span, kind = string.match(of, '^(%d+):(.*)$')
    if KEEP[span] then
      local index, oldest = B .. K_PERIODS .. of, text_of(math.floor(now / 1000000) - KEEP[span])
      for _, at in ipairs(call('ZRANGEBYSCORE', index, '-inf', '(' .. oldest, 'LIMIT', 0, most - many)) do
        call('UNLINK', period_key(span, at, kind))
        leave_lists(span, kind, at)
        many = many + 1
      end
    end
  end
  return many
end

function Verbs.history()
  local verb = ARGV[5]
  if verb == 'range' then return range(unpack(ARGV, 6, 11)) end
  if verb == 'added' then return {folds(), call('LRANGE', B .. K_COUNTS, 0, ARGV[6] - 1)} end
  return sums()
end

function Verbs.history_change() return cached_reply() or cache_reply(change()) end

end
